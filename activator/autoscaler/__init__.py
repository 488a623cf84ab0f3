"""How many instances a revision should have: pure functions of frozen records, and the windows that
supply their averages.

`windows.py` averages measurements, `kpa.py` reproduces Knative's decision, `decider.py` adds what
KPA lacks, `scale_down.py` says which instances stop; `scaling_decision.py` has their records. None
of these reads a clock, waits, or starts anything; `autoscaler_loop.py` does. `heartbeat.py` keeps
the membership among several activators."""
