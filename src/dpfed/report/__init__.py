"""Reports: pages, tables, plots and model cards of runs."""
