"""The usage ledger, its rollups, prices, invoices, reports and budgets. How alerts reach a webhook
is in `webhooks`."""
