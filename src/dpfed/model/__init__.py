"""Models as one flat vector (`space.py`), per-sample gradients (`per_sample.py`, `twins.py`), LoRA, blocks, models by name (`zoo/`)."""
