"""Prepaid credit of tenants' customers: accounts, the ledger of grants and withdrawals, and what
usage draws from them."""
