"""Takes the same rows as rows.py, and says nothing of what they are: nothing is checked."""

from typing import Any

import pilotlight

app = pilotlight.App("bench-anything")


@app.function(cpu=0.25, memory="256MiB", max_instances=1)
def count(rows: Any) -> int:
    """How many rows there are."""
    return len(rows)
