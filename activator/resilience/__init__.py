"""What keeps a failure small: breakers, ejection, retries with a budget, and what answers when a function cannot.

Decisions are pure (`breaker`, `outliers`, `retries`, `budgets`, `rungs`); `persistence` and `ladder` carry them out around the dispatcher.
"""
