"""Canary rollouts: shift traffic from the stable revision to a candidate in steps, guarded by
metric gates, and roll back automatically when the candidate is worse.

`plan` (the requested rollout), `records` (evidence and decisions),
`metric_gates`, `abort_conditions` and `decision` are pure. `lifecycle` starts, advances and ends a
rollout in the tables; `evidence` collects observations; `loop` decides each second; `views` formats
rollouts for the API."""
