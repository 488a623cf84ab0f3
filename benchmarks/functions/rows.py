"""Takes rows of numbers: what is checked grows with its argument."""

import pilotlight

app = pilotlight.App("bench-rows")


@app.function(cpu=0.25, memory="256MiB", max_instances=1)
def count(rows: list[list[int]]) -> int:
    """How many rows there are."""
    return len(rows)
