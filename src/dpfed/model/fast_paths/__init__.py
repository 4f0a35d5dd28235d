"""Shortcuts for common layers, built on `accel`; each equals its plain layer."""
