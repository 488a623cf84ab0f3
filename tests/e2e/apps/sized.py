"""Functions of other sizes than the warm pods of the stories."""

import os

import pilotlight

app = pilotlight.App("sized")


@app.function(cpu=0.3, memory="1536MiB", max_instances=1, scaledown_window=2)
def larger() -> str:
    """The pod that it ran in."""
    return os.uname().nodename


@app.function(cpu=0.1, memory="300MiB", max_instances=1, scaledown_window=2)
def smaller() -> str:
    """The pod that it ran in."""
    return os.uname().nodename
