"""What the load runs on while processes are killed around it."""

import asyncio
import os
import time

import pilotlight

app = pilotlight.App("work")


@app.function(cpu=0.5, memory="256MiB", min_instances=3, max_instances=3)
@pilotlight.concurrent(max_inputs=10)
async def nap(n: int, seconds: float = 0.05) -> list[object]:
    """Sleep, then say who answered. Three instances, always: what comes and goes is not the
    autoscaler's doing."""
    await asyncio.sleep(seconds)
    return [n, os.environ["PILOTLIGHT_INSTANCE"]]


@app.function(cpu=0.5, memory="256MiB", max_instances=3, idempotent=True)
@pilotlight.concurrent(max_inputs=10)
async def again(n: int, seconds: float = 0.05) -> list[object]:
    """As `nap`, and may be run twice."""
    await asyncio.sleep(seconds)
    return [n, os.environ["PILOTLIGHT_INSTANCE"]]


@app.function(cpu=0.25, memory="256MiB", max_instances=2)
def cold(n: int) -> int:
    """Starts from zero."""
    time.sleep(0.01)
    return n
