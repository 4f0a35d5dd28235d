"""The privacy statement of a run: one object for the command, the report, the card and Python."""
