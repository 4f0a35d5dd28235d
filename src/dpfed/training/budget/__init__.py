"""The privacy spending of a run: plan it, write it to the ledger each round, and read it again."""
