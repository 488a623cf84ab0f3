"""The functions behind soak.py: one that is always called, one that raises, one that stores."""

import pilotlight

app = pilotlight.App("bench-soak")
totals = pilotlight.Dict.from_name("soak-totals", create_if_missing=True)
tasks = pilotlight.Queue.from_name("soak-tasks", create_if_missing=True)
KEYS = 100
"""Most keys of the dict, so that it stops growing."""


@app.function(cpu=0.1, memory="128MiB", min_instances=1, max_instances=1, example=["ready"])
@pilotlight.concurrent(max_inputs=64)
async def echo(text: str) -> str:
    """What came in."""
    return text


@app.function(cpu=0.1, memory="128MiB", max_instances=1)
@pilotlight.concurrent(max_inputs=64)
async def fails(number: int) -> int:
    """Raise an error, as user code does."""
    raise ValueError(f"call {number}")


@app.function(cpu=0.1, memory="128MiB", max_instances=1)
def stores(number: int) -> int:
    """Write to a dict, and pass an item through a queue."""
    totals[number % KEYS] = number
    tasks.put(number)
    return int(tasks.get(timeout=5))
