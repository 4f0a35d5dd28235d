"""Data: sources that read records (`sources/`) and partitions that say who holds which (`partition.py`)."""
