"""How many instances a revision should have: pure functions of frozen records, and the windows that
supply their averages.

`windows.py` averages measurements, `kpa.py` reproduces Knative's decision, `bounds.py` its floor,
ceiling and scale to zero, `decider.py` combines them and adds what KPA lacks, `scale_down.py`
selects the instances to drain. None of these reads a clock, waits, or starts anything;
`autoscaler_loop.py` does. `heartbeat.py` keeps the membership among several activators."""
