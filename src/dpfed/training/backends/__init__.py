"""Backends, which compute a cohort in one process, in several, or together with other runs."""
