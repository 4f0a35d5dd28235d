"""Python files that are copied into the folder of an exported model.

They need only torch, Pillow and transformers, so users of the model need not install dpfed.
"""
