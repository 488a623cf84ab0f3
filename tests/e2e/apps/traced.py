"""Calls that say what they do."""

import time
from collections.abc import AsyncIterator

import pilotlight

app = pilotlight.App("traced")


@app.function(
    cpu=0.25,
    memory="128MiB",
    objectives=pilotlight.Objectives(warm_latency_s=3600, first_token_s=3600),
)
def split(text: str) -> list[str]:
    with pilotlight.span("tokenise", characters=len(text)), pilotlight.span("look up"):
        time.sleep(0.001)
        return text.split()


@app.function(cpu=0.25, memory="128MiB")
async def stream(n: int) -> AsyncIterator[int]:
    for i in range(n):
        with pilotlight.span(f"item {i}"):
            yield i
