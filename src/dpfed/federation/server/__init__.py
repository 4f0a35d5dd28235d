"""The server of a federation: it lets clients on a network compute the rounds of a training."""
