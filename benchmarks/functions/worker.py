"""The victim of tenancy.py: ten milliseconds of work on a CPU, and nothing else."""

import time

import pilotlight

app = pilotlight.App("bench-worker")


@app.function(cpu=0.5, memory="128MiB", min_instances=1, max_instances=1, example=[1.0])
def work(milliseconds: float) -> int:
    """Keep a CPU busy for so long, by its own clock; how often it looked at it."""
    until = time.thread_time() + milliseconds / 1000
    looked = 0
    while time.thread_time() < until:
        looked += 1
    return looked
