"""Failure containment: circuit breakers, outlier ejection and retry budgets.

Decisions are pure functions (`breaker`, `outliers`, `declared_retries`, `calls.fallback_rules`);
`calls.runner` and `calls.fallback` apply them."""
