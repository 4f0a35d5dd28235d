"""The engine: `setup.py` builds a job, `rounds.py` is the one round loop, `fleet.py` computes a cohort, `run.py` is all of it."""
