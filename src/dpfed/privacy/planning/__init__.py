"""Plan a federation before it begins: the batch, the noise and the choice of cohorts."""
