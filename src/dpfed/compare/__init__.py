"""Methods side by side: the arms of a study, a search of equal effort for each, workers that run them, the table."""
