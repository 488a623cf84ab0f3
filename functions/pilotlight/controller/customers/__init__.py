"""Customers of tenants: budgets and quotas that they get without being named one by one."""
