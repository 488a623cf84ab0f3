"""Failure containment: circuit breakers, outlier ejection and retry budgets.

Decisions are pure functions (`breaker`, `outliers`, `retry_policy`, `retry_budget`,
`calls.fallback_rules`); `calls.retry_executor` and `calls.fallback` apply them around the call
runner."""
