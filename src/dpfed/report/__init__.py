"""What people look at: plots, tables and pages made from runs."""
