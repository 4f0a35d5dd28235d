"""Federated training over a network: messages, the server, the clients and their policies."""
