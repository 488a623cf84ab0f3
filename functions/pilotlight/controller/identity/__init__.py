"""Who calls and what it may do: tenants and their plans, API keys, quotas, dashboard sessions.
Secrets of functions are in `registry`."""
