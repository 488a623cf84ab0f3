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
