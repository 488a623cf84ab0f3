"""What keeps a failure small: breakers, ejection, retries with a budget, and what answers when a
function cannot.

Decisions are pure (`breaker`, `outliers`, `retries`, `retry_budget`, `fallback_rules`); `retry` and
`fallback` carry them out around the dispatcher."""
