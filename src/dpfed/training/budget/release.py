"""How the release notes of runs begin that protect nothing."""

NO_PRIVACY = "no privacy"
SEEDED = "simulation"
