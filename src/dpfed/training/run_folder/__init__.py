"""Files of a run: its folder, checkpoints, resuming, and atomic writing."""
