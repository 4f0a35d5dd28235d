"""Files of a run: folder, checkpoints, resuming, atomic writing."""
