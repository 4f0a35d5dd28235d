"""The privacy statement of a run: its epsilon, and the conditions under which epsilon holds.

`dpfed privacy --statement`, the report of a run and the model card show the same statement.
"""
