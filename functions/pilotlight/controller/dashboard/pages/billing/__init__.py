"""Pages of the section Billing: budgets with quotas, and invoices. Usage is an overview's page."""
