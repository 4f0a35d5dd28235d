"""Observers of a run: trackers, diagnostics, progress."""
