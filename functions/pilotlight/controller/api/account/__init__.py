"""Routes about a tenant: keys, plans, quotas, secrets and environments, budgets, invoices,
webhooks, the audit log."""
