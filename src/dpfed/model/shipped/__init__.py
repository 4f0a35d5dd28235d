"""Python files that are copied into an export, and so run without dpfed.

They need only torch, Pillow and transformers.
"""
