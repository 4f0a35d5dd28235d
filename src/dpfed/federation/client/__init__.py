"""The client of a federation: its data, ledger, noise and storage."""
