"""Statistics for audits of the claimed epsilon: lower bounds, and tests of batches and noise.

An audit adds canaries, and a fair coin decides for each one if it is in the training data.
"""
