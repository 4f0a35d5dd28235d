"""Files of a training run: its folder, checkpoints, resuming, and atomic writing."""
