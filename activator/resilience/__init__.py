"""Failure containment: circuit breakers, outlier ejection, retry budgets, and the response cache
for fallbacks.

Decisions are pure functions (`breaker`, `outliers`, `retry_policy`, `retry_budget`,
`calls.fallback_rules`); `calls.retry_executor` and `calls.fallback` apply them around the call
runner."""
