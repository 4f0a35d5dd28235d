"""The first words of the release note in results of runs that protect nothing."""

NO_PRIVACY = "no privacy"
SEEDED = "simulation"
