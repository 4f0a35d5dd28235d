"""Private gradients: how they are noised, what epsilon they cost, and the record of all costs."""
