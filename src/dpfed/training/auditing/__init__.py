"""Audits of a job: try to disprove its claimed epsilon by training with canaries.

A canary is a unit (one record, or all records of one person) for which a fair coin decides if it is
in the data.
"""
