"""Figures of runs and studies: interactive figures for the page, and plots for files."""
