"""First words of the note in run.json that says if the results of a run may be released."""

NO_PRIVACY = "no privacy"
SEEDED = "simulation"
