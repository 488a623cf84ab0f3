"""Statistics of experiments, rollouts and drift. Pure: numbers in, numbers out; no tables.

`estimates`: metrics of arms with intervals that hold at any time. `sequential_tests`: tests of
rollouts that hold at any time. `distributions`: differences of distributions. `quality`: measures
of predictions with labels."""
