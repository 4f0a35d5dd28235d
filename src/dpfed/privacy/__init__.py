"""The private mechanism, its oracle, its accounting and its ledger."""
