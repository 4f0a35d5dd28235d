"""Faster versions of common layers, built on `accel`. Each gives the results of its plain layer."""
