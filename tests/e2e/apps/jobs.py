"""Functions that are called when nobody waits: by a schedule, again after a failure, and later."""

import time

import pilotlight

app = pilotlight.App("jobs")


@app.function(
    cpu=0.25,
    memory="256MiB",
    scaledown_window=1,
    schedule=pilotlight.Period(seconds=1, arguments={"step": 1}),
)
def tick(step: int) -> int:
    """Called each second."""
    return step


@app.function(
    cpu=0.25, memory="256MiB", retries=pilotlight.Retries(5, initial_delay=0.01, max_delay=0.05)
)
def third_time() -> int:
    """Succeeds in its third attempt."""
    attempt = pilotlight.context().attempt
    if attempt < 3:
        raise ValueError(f"attempt {attempt}")
    return attempt


@app.function(
    cpu=0.25, memory="256MiB", retries=pilotlight.Retries(1, initial_delay=0.01, max_delay=0.05)
)
def fourth_time() -> int:
    """Succeeds in its fourth attempt, of which its retries allow two."""
    attempt = pilotlight.context().attempt
    if attempt < 4:
        raise ValueError(f"attempt {attempt}")
    return attempt


@app.function(cpu=0.25, memory="256MiB", max_containers=1)
def slow(seconds: float) -> float:
    """Takes its time, one call after the other."""
    time.sleep(seconds)
    return seconds
