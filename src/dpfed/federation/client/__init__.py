"""A real client of a federation: it has private records, adds noise, and records privacy loss."""
