"""The function behind burst.py: says when it ran, and where."""

import os
import time

import pilotlight

app = pilotlight.App("bench-sleepy")


@app.function(cpu=0.1, memory="128MiB", max_instances=8, scaledown_window=2, example=[0.0])
@pilotlight.concurrent(max_inputs=1)
def sleepy(seconds: float) -> dict[str, float | str]:
    """Hold the instance for `seconds`; wall clock of both ends."""
    began = time.time()
    time.sleep(seconds)
    return {
        "began": began,
        "ended": time.time(),
        "where": f"{os.readlink('/proc/self/ns/pid')}/{os.getpid()}",
    }
