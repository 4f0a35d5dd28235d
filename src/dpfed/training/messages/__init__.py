"""Messages of a round: formats of their vectors, rounding in simulations, and sizes."""
