"""Prepare everything that a run needs before round 1: data, model and privacy plan."""
