"""Timings of one private local step of many clients, compared with other ways to compute it."""
