"""Work that costs money, under a budget."""

import time

import pilotlight

app = pilotlight.App("purse")


@app.function(cpu=0.25, memory="256MiB", max_instances=4, timeout=2.0, idempotent=True)
def spend(seconds: float) -> float:
    """Hold an instance."""
    time.sleep(seconds)
    return seconds
