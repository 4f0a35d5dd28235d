"""Faster versions of common layers, built on `accel`. Each gives the same results as its layer."""
