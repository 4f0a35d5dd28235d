"""Training runs: preparing a run, its round loop, where clients compute, budget and run folder."""
