"""Federations over a network: their messages, server, clients, and each client's own policy."""
