"""Failure containment: circuit breakers, outlier ejection and retry budgets.

Decisions are pure functions (`breaker`, `outliers`, `retry_policy`, `calls.fallback_rules`);
`calls.runner` and `calls.fallback` apply them."""
