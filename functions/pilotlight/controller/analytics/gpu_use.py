"""The use of granted GPUs now, as NVML tells the node agents. What it does not tell is None, and a
GPU without any figure is left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNow:
    """One GPU, or MIG instance, of a function.

    Attributes:
        sm_utilisation: share of the last sample period in which a kernel ran, 0 to 1.
        weights_bytes: weights in its memory.
    """

    app: str
    function: str
    gpu: str
    uuid: str
    sm_utilisation: float | None
    used_bytes: int
    memory_bytes: int
    weights_bytes: int = 0

    @property
    def name(self) -> str:
        """`app/function`."""
        return f"{self.app}/{self.function}"

    @property
    def used(self) -> float:
        """Share of its memory in use."""
        return self.used_bytes / self.memory_bytes if self.memory_bytes else 0.0


def of_agent(gpus: Iterable[Mapping[str, Any]], own: Mapping[str, str]) -> list[GpuNow]:
    """Return those of a node's GPUs (`snapshotter.gpus.view.GpuUse` as JSON) whose function has
    these labels."""
    return [
        GpuNow(
            app=str(gpu["labels"].get("app", "")),
            function=str(gpu["labels"].get("function", "")),
            gpu=str(gpu["kind"]),
            uuid=str(gpu["uuid"]),
            sm_utilisation=gpu["sm_utilisation"],
            used_bytes=int(gpu["used_bytes"]),
            memory_bytes=int(gpu["memory_bytes"]),
            weights_bytes=int(gpu["delivered_bytes"]),
        )
        for gpu in gpus
        if gpu["used_bytes"] is not None and own.items() <= gpu["labels"].items()
    ]


def describe(gpus: Iterable[GpuNow]) -> str:
    """The most that a function's GPUs compute and hold now; "" without a figure."""
    found = list(gpus)
    if not found:
        return ""
    rates = [gpu.sm_utilisation for gpu in found if gpu.sm_utilisation is not None]
    busy = f"compute {100 * max(rates):.0f} % and " if rates else ""
    return f"its GPUs now {busy}use {100 * max(gpu.used for gpu in found):.0f} % of their memory"
