"""Weights that are not trained: their hash, their storage in few bits, unused parameters."""
