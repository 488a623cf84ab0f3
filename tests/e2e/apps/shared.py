"""What a tenant keeps to itself, shares with another, and gives to everybody."""

import pilotlight

app = pilotlight.App("shared")


@app.function(cpu=0.25, memory="256MiB", max_instances=1)
def own(n: int) -> int:
    """For its own tenant."""
    return n


@app.function(cpu=0.25, memory="256MiB", max_instances=1, access=["default"])
def lent(n: int) -> int:
    """For the platform's first tenant, too."""
    return n


@app.function(cpu=0.25, memory="256MiB", max_instances=1, access=["*"])
def public(n: int) -> int:
    """For whoever asks."""
    return n
