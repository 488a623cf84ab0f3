"""The heavy one of tenancy.py: streams small items at a model's pace, as many streams at once as it
may."""

import asyncio
from collections.abc import AsyncIterator

import pilotlight

app = pilotlight.App("bench-tokens")


@app.function(cpu=0.5, memory="256MiB", min_instances=1, max_instances=1)
@pilotlight.concurrent(max_inputs=16)
async def speak(items: int, pause_ms: float) -> AsyncIterator[str]:
    """`items` words, one each `pause_ms`."""
    for i in range(items):
        await asyncio.sleep(pause_ms / 1000)
        yield f"word {i}"
