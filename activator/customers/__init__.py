"""Customers of tenants, as far as activators know them: those that have budgets."""
