"""Models: the flat vector of trainable numbers, per-sample gradients, LoRA, and models by name."""
