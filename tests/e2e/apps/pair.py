"""What two activators share: two instances, one call each."""

import os
import time

import pilotlight

app = pilotlight.App("pair")


@app.function(cpu=0.25, memory="256MiB", max_instances=2)
def greet(n: int) -> list[object]:
    """Work a little, then say who did it."""
    time.sleep(0.02)
    return [n, os.environ["PILOTLIGHT_INSTANCE"]]


@app.function(cpu=0.25, memory="256MiB", max_instances=4)
def nap(seconds: float) -> float:
    """Long enough to be cancelled."""
    time.sleep(seconds)
    return seconds


@app.function(cpu=0.25, memory="256MiB", max_instances=2)
def relay(n: int) -> list[object]:
    """Call `greet`, and submit it twice under one key: what it answers, and the number of calls."""
    first = greet.remote(n)
    under_key = greet.with_options(idempotency_key=f"relay {n}")
    calls = [under_key.spawn(n), under_key.spawn(n)]
    return [first[0], len({call.id for call in calls}), calls[0].get(timeout=30)[0]]
