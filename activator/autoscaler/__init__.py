"""How many instances a revision should have: pure functions of frozen records, and the windows that
feed them.

`target.py` derives numbers from settings, `windows.py` averages what was seen, `kpa.py` is
Knative's decision number for number, `bounds.py` its floor, ceiling and way to zero, `poke.py`
sizes the starts for a burst, `decider.py` puts them together with what KPA lacks, `scale_down.py`
picks who goes. Nothing here reads a clock, waits, or starts anything."""
