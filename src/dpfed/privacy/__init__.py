"""Privacy: `oracle.py` is the only place that touches records; `mechanism.py` is what it runs, what the ledger stores and what is accounted."""
