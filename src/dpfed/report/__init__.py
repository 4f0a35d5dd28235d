"""Reports on training runs: HTML pages, tables, plots and model cards."""
