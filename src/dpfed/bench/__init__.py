"""Time one private local step of many clients, and the same step by other implementations."""
