"""Service level objectives: what of an error budget is spent, how fast, who is told, and what may
not be released meanwhile."""
