"""Which samples are in a micro-batch: mixed sources, token budgets, balanced costs."""
