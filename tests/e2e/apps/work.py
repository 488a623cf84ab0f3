"""What the load runs on while processes are killed around it."""

import asyncio
import os
import time

import pilotlight

app = pilotlight.App("work")


@app.function(cpu=0.5, memory="256MiB", min_instances=2, max_instances=4)
@pilotlight.concurrent(max_inputs=10)
async def nap(n: int, seconds: float = 0.05) -> list[object]:
    """Sleep, then say who answered."""
    await asyncio.sleep(seconds)
    return [n, os.environ["PILOTLIGHT_INSTANCE"]]


@app.function(cpu=0.25, memory="256MiB", max_instances=2)
def cold(n: int) -> int:
    """Starts from zero."""
    time.sleep(0.01)
    return n
