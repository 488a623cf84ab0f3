"""Commands on tenants: credentials, plans, quotas, budgets, bills, storage, webhooks, the audit
log."""
