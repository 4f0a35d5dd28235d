"""Privacy budgets of a run: planned, charged and recorded spending."""
