"""The privacy spending of a run: plan it, charge it round by round, and read it from the ledger."""
