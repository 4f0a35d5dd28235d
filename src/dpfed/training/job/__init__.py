"""Everything a run needs before round 1: data, model, plan."""
