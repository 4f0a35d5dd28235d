"""The privacy ledger: an append-only file of all privacy loss that clients have spent."""
