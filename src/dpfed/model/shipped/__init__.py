"""Python files that exports carry: they need torch, Pillow and transformers, but not dpfed."""
