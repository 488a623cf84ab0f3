"""Functions that run as pods of a cluster."""

import os
import time

import pilotlight

app = pilotlight.App("podded")


@app.function(cpu=0.1, max_instances=3, scaledown_window=2)
def add(a: int, b: int) -> int:
    """Plain."""
    return a + b


@app.function(cpu=0.1, memory="256MiB", max_instances=3, scaledown_window=2)
def where(seconds: float = 0.0) -> str:
    """The pod that it ran in."""
    time.sleep(seconds)
    return os.uname().nodename


@app.function(cpu=0.1, min_instances=1, max_instances=2)
def stays(seconds: float = 0.0) -> str:
    """There is a pod of it at any time; this is its name."""
    print(f"waits {seconds} s", flush=True)
    time.sleep(seconds)
    return os.uname().nodename


@app.function(cpu=0.1, max_instances=1, scaledown_window=2, gpu="H100")
def on_a_gpu() -> str:
    """No node of the tests has one."""
    return "never"
