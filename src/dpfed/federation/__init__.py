"""Real federations: what a server and its clients say to each other, and how each client guards its own budget."""
