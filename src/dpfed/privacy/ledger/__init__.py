"""The privacy ledger: an append-only file of everything that clients have spent."""
