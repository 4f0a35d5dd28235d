"""Time one private training step of many clients, in this project and in other implementations."""
