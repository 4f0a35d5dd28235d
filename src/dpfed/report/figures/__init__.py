"""Figures of runs and studies: interactive ones for the page, and plots for files."""
