"""First words of `release` in the result of a run that protects nothing."""

NO_PRIVACY = "no privacy"
SEEDED = "simulation"
