"""Faster forms of common layers, built on `accel`; each equals its plain layer."""
