"""Accounting: compute the epsilon of each observer from the mechanisms that were executed."""
