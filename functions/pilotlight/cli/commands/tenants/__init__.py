"""Commands for tenants: credentials, plans, quotas, budgets, billing, storage, webhooks, audit
log."""
