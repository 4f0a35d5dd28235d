"""Exact isolation: one unit never changes another unit's gradient, not even by rounding."""
