"""Exact isolation: one unit never changes another unit's gradient, not even by rounding.

A unit is one record, or all records of one person.
"""
