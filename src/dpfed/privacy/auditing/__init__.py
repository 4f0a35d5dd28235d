"""Statistics of audits: lower bounds on epsilon from canaries, and tests of batches and noise."""
