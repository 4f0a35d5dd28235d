"""The server of a federation: a backend of the round loop."""
