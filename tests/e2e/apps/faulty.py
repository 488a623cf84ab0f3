"""Functions that go wrong in every way that user code can, and well-behaved neighbours of
theirs."""

import dataclasses
import os
import signal
import sys
import time

import pilotlight

app = pilotlight.App("faulty")

LINE = "x" * 99 + "\n"


class OrderRejected(Exception):
    """Raised by `refuse`: a class of the user's own."""

    def __init__(self, order: int) -> None:
        super().__init__(order)
        self.order = order

    def __str__(self) -> str:
        return f"order {self.order} is rejected"


@dataclasses.dataclass
class Point:
    """An argument with a shape of its own."""

    x: int
    y: int = 0


@app.function(cpu=0.25, memory="256MiB")
def area(width: int, height: float = 1.0) -> float:
    """Typed arguments."""
    return width * height


@app.function(cpu=0.25, memory="256MiB")
def describe(data: bytes, corner: Point) -> str:
    """Arguments that JSON has no types for."""
    return f"{type(data).__name__} {len(data)} {type(corner).__name__} {corner.x},{corner.y}"


@app.function(cpu=0.25, memory="256MiB")
def refuse(order: int) -> None:
    """Raises an exception of the user's own."""
    secret_detail = f"internal-{order}"
    raise OrderRejected(order) if secret_detail else AssertionError


@app.function(cpu=0.25, memory="256MiB", timeout=3.0, max_instances=2)
def stubborn(forever: bool) -> str:
    """Never returns when asked to, and swallows whatever is raised in it; else says which instance
    it is."""
    while forever:
        try:
            time.sleep(0.01)
        except BaseException:  # noqa: BLE001  # what no function should do
            continue
    return os.environ["PILOTLIGHT_INSTANCE"]


@app.function(cpu=0.25, memory="256MiB", max_instances=2)
def suicide(die: bool) -> str:
    """Kills its own process when asked to."""
    if die:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


@app.function(cpu=1.0, memory="256MiB", timeout=60)
def chatter(megabytes: int) -> int:
    """Prints that much."""
    piece = LINE * (1024 * 1024 // len(LINE))
    written = 0
    for _ in range(megabytes):
        written += sys.stdout.write(piece)
    return written


@app.function(cpu=0.25, memory="128MiB", max_instances=2)
def devour(mebibytes: int) -> int:
    """Uses that much memory."""
    kept = [b"\xa5" * 1024 * 1024 for _ in range(mebibytes)]
    return len(kept)


@app.function(cpu=0.25, memory="256MiB")
def neighbour() -> str:
    """Minds its own business."""
    return "fine"
