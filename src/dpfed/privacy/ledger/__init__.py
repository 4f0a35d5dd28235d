"""The privacy ledger: an append-only record of everything that was charged."""
