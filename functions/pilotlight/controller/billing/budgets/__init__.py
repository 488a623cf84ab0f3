"""Budgets: as they are stored, changes of them, and what is spent."""
