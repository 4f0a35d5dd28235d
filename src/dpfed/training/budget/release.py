"""First words of the release note in run.json, which says if a run's results may be released."""

NO_PRIVACY = "no privacy"
SEEDED = "simulation"
