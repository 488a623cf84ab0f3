"""The usage ledger, its rollups, prices, invoices, reports and budgets. Webhook delivery of alerts
is in `webhooks`."""
