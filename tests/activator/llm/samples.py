"""Readings and views of engines for tests, said by hand or by the fake engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from activator.llm.engine_metrics import EngineMetrics, Histogram

BOUNDS_S = (0.1, 0.25, 0.5, 1.0, float("inf"))


@dataclass(kw_only=True, eq=False)
class Spot:
    """An `affinity.Place`."""

    id: str
    capacity: int = 8
    in_flight: int = 0
    is_blocked: bool = False

    def has_slot(self, now: float) -> bool:
        return self.in_flight < self.capacity and not self.is_blocked


def reading(
    running: int = 0, waiting: int = 0, kv_use: float | None = 0.0, **more: Any
) -> EngineMetrics:
    """What an engine says."""
    return EngineMetrics(running=running, waiting=waiting, kv_use=kv_use, **more)


def histogram(*times_s: float) -> Histogram:
    """These times, as an engine would count them."""
    return Histogram(
        bounds_s=BOUNDS_S,
        counts=tuple(float(sum(t <= b for t in times_s)) for b in BOUNDS_S),
        sum_s=sum(times_s),
    )
