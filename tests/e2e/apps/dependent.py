"""What is called while a process that the platform consists of is away."""

import pilotlight

app = pilotlight.App("dependent")


@app.function(cpu=0.25, memory="128MiB", min_instances=1)
def warm(n: int) -> int:
    """Is there."""
    return n


@app.function(
    cpu=0.25, memory="128MiB", scaledown_window=1, fallback=[pilotlight.static_answer(-1)]
)
def cold(n: int) -> int:
    """Has to be started, or its fallback answers."""
    return n


@app.function(cpu=0.25, memory="128MiB")
def first(n: int) -> int:
    """Is called for the first time while something is away."""
    return n
