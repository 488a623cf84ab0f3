"""Computes when nobody calls it, and in an `enter()` that fails."""

import threading
import time

import pilotlight

app = pilotlight.App("background")
BURST_S = 0.5


def burn(seconds: float) -> None:
    """Use so many seconds of CPU time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@app.cls(cpu=0.5, memory="256MiB", max_instances=1, scaledown_window=2)
class Worker:
    """Goes on after it has answered."""

    @pilotlight.method()
    def later(self, seconds: float) -> float:
        """Answer, and compute afterwards."""
        threading.Timer(0.05, burn, (seconds,)).start()
        return seconds

    @pilotlight.method()
    def now(self, seconds: float) -> float:
        """Compute, and answer afterwards."""
        burn(seconds)
        return seconds


@app.cls(cpu=0.5, memory="256MiB", max_instances=1)
class Failing:
    """Computes until its `enter()` fails."""

    @pilotlight.enter(snap=False)
    def begin(self) -> None:
        """Fail late."""
        burn(BURST_S)
        raise RuntimeError("it never works")

    @pilotlight.method()
    def call(self) -> None:
        """Is never reached."""
