"""Hard budgets and prepaid credit: what is left of each, what calls reserve and pay, how activators
share them, and how they follow the ledger."""
