"""Plan a federation before training: batch size, noise, and how each round's clients are chosen."""
