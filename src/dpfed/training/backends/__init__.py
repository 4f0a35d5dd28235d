"""Backends compute the clients of a round: in one process, in several, or with other runs."""
