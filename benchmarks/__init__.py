"""Measurements, side by side with what they compare to, in one run. They print tables and never fail on time.

`harness` holds options, statistics and output; `stack` a platform of its own; `load` the load generators; `peers` other servers. Every
other module is a benchmark: `python -m benchmarks.<name> [--quick] [--peers] [--json FILE]`.
"""
