"""Audits of a job: canaries in its oracle, its messages and its model, and tests of its draws."""
