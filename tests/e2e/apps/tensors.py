"""Functions that take and return tensors."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import numpy.typing as npt

import pilotlight

app = pilotlight.App("tensors")


@app.function()
def seen(array: np.ndarray) -> Any:
    """Answer with the argument."""
    return array


@app.function()
def scaled(image: npt.NDArray[np.float32], scale: float = 1.0) -> dict[str, Any]:
    """A member that is an array, and one that is none."""
    return {"mean": image.mean(0) * np.float32(scale), "items": image.size}


@app.function()
def summed(rows: list[list[float]]) -> float:
    """Lists, not arrays."""
    return sum(map(sum, rows))


@app.function()
def reverse(data: bytes) -> bytes:
    """Bytes."""
    return data[::-1]


@app.function()
def fails(image: npt.NDArray[np.float32]) -> None:
    """Raise."""
    raise ValueError("no")


@app.function(max_instances=4)
def dies(seconds: float = 0.0) -> int:
    """Sleep; without a time, end the worker in the middle of the call."""
    if not seconds:
        os.kill(os.getpid(), 9)
    time.sleep(seconds)
    return 0
