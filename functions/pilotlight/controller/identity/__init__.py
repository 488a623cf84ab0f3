"""Identity and permissions: tenants and their plans, API keys, quotas, dashboard sessions. Secrets
of functions are in `registry`."""
