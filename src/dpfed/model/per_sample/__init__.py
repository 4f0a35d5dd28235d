"""Per-sample gradients of a whole model in one forward and one backward pass."""
