"""Beginnings of the release note in run.json: without privacy, and with seeded noise."""

NO_PRIVACY = "no privacy"
SEEDED = "simulation"
