"""Messages between server and clients: formats of their vectors, rounding, and sizes."""
