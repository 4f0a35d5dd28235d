"""Callbacks that watch a run: progress, metrics, checkpoints, trackers, diagnostics."""
