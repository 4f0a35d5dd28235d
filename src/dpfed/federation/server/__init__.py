"""The server of a federation, which is a backend of the round loop."""
