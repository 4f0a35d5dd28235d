"""Faster versions of common layers, built on `accel`, with the same results as the plain layers."""
