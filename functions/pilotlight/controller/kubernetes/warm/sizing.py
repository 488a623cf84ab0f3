"""How many warm pods a shape keeps. Pure.

A claimed pod is replaced at once (its ReplicaSet makes another), so the pool is an inventory with
one-for-one replenishment: the (S-1, S) policy of Feeney and Sherbrooke, "The (s-1, s) inventory
policy under compound Poisson demand" (Management Science 12, 1966). Such a pool has a pod for every
start if its level S is the demand of one lead time, here the time until a replacement is ready.
Starts come in bursts, which no rate describes, so the level is not computed from one: it is the
largest number of starts that were seen within a lead time (the demand itself, as in the
distribution-free newsvendor). It is kept for some minutes, as the Kubernetes HPA keeps its highest
recommendation (`stabilizationWindowSeconds`), so that a burst that comes again finds the pods, and
the number does not oscillate. `min_pods` is the floor, for the first start after a pause, and
`max_pods` what the pool may cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from pilotlight.spec.warm_shape import WarmShape

LEAD_S = 30.0
"""Until a claimed pod is replaced by one that is ready: scheduling, container, imports. 2.8 to
12.6 s were seen for whole starts from zero (docs/benchmarks/kubernetes.md), more on busy nodes."""
KEEP_S = 600.0
"""How long the largest burst determines the number of pods."""
MAX_STARTS = 10_000
"""Starts that are remembered of a shape; more than `max_pods` within a lead time change nothing."""


def wanted_pods(shape: WarmShape, starts: Sequence[float], *, now: float) -> int:
    """The number of warm pods: the most starts within `LEAD_S` of the last `KEEP_S`, between the
    shape's bounds. `starts`: their times in seconds, ascending, those without a pod included."""
    recent = [at for at in starts if now - KEEP_S < at]
    peak, first = 0, 0
    for last, at in enumerate(recent):
        while recent[first] <= at - LEAD_S:
            first += 1
        peak = max(peak, last - first + 1)
    return min(shape.max_pods, max(shape.min_pods, peak))


class RecentStarts:
    """The times of starts by shape. Owner: the leader's event loop. `on_add` is called for each."""

    def __init__(self, on_add: Callable[[], None] = lambda: None) -> None:
        self._on_add = on_add
        self._of: dict[str, deque[float]] = {}

    def __repr__(self) -> str:
        return f"<RecentStarts { ({name: len(found) for name, found in self._of.items()}) }>"

    def add(self, shape: str, *, now: float) -> None:
        """Note a start that wanted a pod of the shape, whether it got one or not."""
        found = self._of.setdefault(shape, deque(maxlen=MAX_STARTS))
        found.append(max(now, found[-1]) if found else now)
        self._on_add()

    def of(self, shape: str) -> Sequence[float]:
        """The shape's starts, in order."""
        return tuple(self._of.get(shape, ()))
