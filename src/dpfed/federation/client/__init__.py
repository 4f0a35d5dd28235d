"""A real client of a federation: it has private records, charges its ledger and adds noise."""
