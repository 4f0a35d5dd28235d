"""A run: the job, the round loop, its backends, its budget and its folder."""
