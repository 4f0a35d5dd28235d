"""Weights that are not trained: their hash, their storage in 8 or 4 bits, unused parameters."""
