"""Rollouts: a candidate takes over from stable step by step, on evidence, and goes back by itself
when it is worse.

`plan` (what was asked), `records` (evidence and decisions), `statistics`, `gates`, `failures` and
`judge` are pure. `lifecycle` begins, moves and ends a rollout in the tables; `evidence` gathers;
`loop` judges each second; `views` tells."""
