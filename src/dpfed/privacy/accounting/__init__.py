"""Accounting: from mechanisms to epsilon, for each observer."""
