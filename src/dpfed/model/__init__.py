"""Models: one flat vector of trainable numbers, per-sample gradients, LoRA, blocks, and a zoo."""
