"""Figures of runs and studies: interactive ones for HTML pages, and plots for image files."""
