"""Private gradients: the mechanism, the oracle that runs it, the accountant and the ledger."""
