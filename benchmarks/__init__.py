"""Measurements, side by side with what they compare to, in one run. They print tables and never
fail on time.

`harness` holds options, statistics and output; `programs` finds nginx and the like; `stack` a
platform of its own; `load` the load generators; `peers` other servers. A module with `main` is a
benchmark: `python -m benchmarks.<name> [--quick] [--peers] [--json FILE]`; `python -m benchmarks`
runs those that `__main__` lists. One whose programs are not all installed starts nothing: it names
them with the command that installs them, and ends with status 2."""
