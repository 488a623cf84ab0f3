"""Service level objectives: remaining error budgets, burn rates, alarms, and release freezes."""
