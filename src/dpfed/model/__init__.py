"""Models as one flat vector, their per-sample gradients, LoRA, blocks and models by name."""
