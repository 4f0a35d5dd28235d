"""Backends that compute a cohort: one fleet, several processes, several runs at once."""
