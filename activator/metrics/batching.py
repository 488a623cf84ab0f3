"""Metrics of batches of functions that gather calls, from the header of each answer
(`pilotlight-batch`).

Workers are not trusted: numbers out of range are dropped, and nothing that a caller pays depends on
them. A batch is counted by the one answer that is marked as its first; how long calls waited is
counted by each."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from activator.metrics.call_counters import FAST, FUNCTION, LabelLimiter
from activator.routing.call_target import CallTarget

SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0)
REASONS = frozenset({"full", "waited", "enough", "alone", "deadline", "idle", "drained", "retried"})
"""`pilotlight.worker.batching.release_policy.ReleaseReason`; any other reported reason is
`other`."""
MEMORY_S = 10.0
"""Decay time of batches in the occupancy: after this long they count about a third."""
FORGOTTEN = 0.05
"""Below this weight a batch is ignored."""
MOST_MS = 7 * 86_400_000.0
_KEYS = ("size", "wait_ms", "held_ms", "compute_ms", "reason", "first")


class FixedHistogram:
    """A histogram over fixed bounds."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Add a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def add_to(self, family: HistogramMetricFamily, labels: tuple[str, ...]) -> None:
        """Add the histogram to a family, cumulative as Prometheus requires."""
        bounds = [str(bound) for bound in self._bounds] + ["+Inf"]
        family.add_metric(
            labels, list(zip(bounds, accumulate(self._counts), strict=True)), self._total
        )


class BatchCounters:
    """Counters of one function's batches."""

    __slots__ = ("compute", "held", "labels", "reasons", "size", "wait")

    def __init__(self, labels: tuple[str, ...]) -> None:
        self.labels = labels
        self.size = FixedHistogram(SIZES)
        self.wait = FixedHistogram(FAST)
        self.held = FixedHistogram(FAST)
        self.compute = FixedHistogram(FAST)
        self.reasons: dict[str, int] = {}


class _Fullness:
    """Decaying average of batch sizes as a share of the maximum size."""

    __slots__ = ("_at", "_sum", "_weight")

    def __init__(self, now: float) -> None:
        self._at = now
        self._sum = self._weight = 0.0

    def record(self, share: float, now: float) -> None:
        left = self._left(now)
        self._at, self._sum, self._weight = now, self._sum * left + share, self._weight * left + 1

    def mean(self, now: float) -> float | None:
        weight = self._weight * self._left(now)
        return self._sum / self._weight if weight >= FORGOTTEN else None

    def _left(self, now: float) -> float:
        return math.exp(-max(0.0, now - self._at) / MEMORY_S)


class Batches(Collector):
    """Counts batches by function, and tracks how full those of each revision are. Owner: the event
    loop; read by the metrics thread."""

    def __init__(self, functions: LabelLimiter) -> None:
        self._functions = functions
        self._tallies: dict[tuple[str, ...], BatchCounters] = {}
        self._fullness: dict[str, _Fullness] = {}

    def __repr__(self) -> str:
        return f"<Batches of {len(self._tallies)} functions>"

    def answered(self, target: CallTarget, method: str, header: bytes, now: float) -> None:
        """Count an answer out of a batch; `header`: the header's value, empty if missing. `now`:
        monotonic seconds."""
        parts = _parsed(header)
        if parts is None:
            return
        labels = self._functions.of(target.tenant, target.app, target.function)
        tally = self._tallies.get(labels)
        if tally is None:
            tally = self._tallies[labels] = BatchCounters(labels)
        size, wait_s, held_s, compute_s, reason, is_first = parts
        tally.wait.observe(wait_s)
        tally.held.observe(held_s)
        if not is_first:
            return
        tally.size.observe(size)
        tally.compute.observe(compute_s)
        tally.reasons[reason] = tally.reasons.get(reason, 0) + 1
        most = target.batched.get(method)
        if most and reason != "retried":
            fullness = self._fullness.get(target.key)
            if fullness is None:
                self._drop_expired(now)
                fullness = self._fullness[target.key] = _Fullness(now)
            fullness.record(min(1.0, size / most), now)

    def forget(self, labels: tuple[str, ...]) -> None:
        """Drop the series of a function."""
        self._tallies.pop(labels, None)

    def occupancy(self, key: str, now: float | None = None) -> float | None:
        """How full the recent batches of a revision (by `CallTarget.key`) were, 0 to 1; None =
        there were none. `now`: None = now."""
        fullness = self._fullness.get(key)
        return None if fullness is None else fullness.mean(time.monotonic() if now is None else now)

    def _drop_expired(self, now: float) -> None:
        for key in [key for key, fullness in self._fullness.items() if fullness.mean(now) is None]:
            del self._fullness[key]

    def collect(self) -> Iterator[HistogramMetricFamily | CounterMetricFamily]:
        """Current values (Prometheus' own interface)."""
        size = HistogramMetricFamily("pilotlight_batch_size", "Calls in a batch.", labels=FUNCTION)
        wait = HistogramMetricFamily(
            "pilotlight_batch_wait_seconds",
            "From a call's arrival in its instance to its batch.",
            labels=FUNCTION,
        )
        held = HistogramMetricFamily(
            "pilotlight_batch_held_seconds",
            "The part of that wait in which its batch could have run.",
            labels=FUNCTION,
        )
        compute = HistogramMetricFamily(
            "pilotlight_batch_compute_seconds", "Execution time of a batch.", labels=FUNCTION
        )
        released = CounterMetricFamily(
            "pilotlight_batch_releases",
            "Batches, by the reason of their release.",
            labels=(*FUNCTION, "reason"),
        )
        for tally in list(self._tallies.values()):
            for family, values in (
                (size, tally.size),
                (wait, tally.wait),
                (held, tally.held),
                (compute, tally.compute),
            ):
                values.add_to(family, tally.labels)
            for reason, count in list(tally.reasons.items()):
                released.add_metric((*tally.labels, reason), count)
        yield from (size, wait, held, compute, released)


def _parsed(header: bytes) -> tuple[int, float, float, float, str, bool] | None:
    """(size, wait, held, compute in seconds, reason, whether it is the first answer of its batch);
    None if invalid."""
    found = dict(part.partition("=")[::2] for part in header.decode("latin-1").split(";"))
    if not all(key in found for key in _KEYS):
        return None
    try:
        size, times = (
            int(found["size"]),
            [float(found[key]) for key in ("wait_ms", "held_ms", "compute_ms")],
        )
    except ValueError:
        return None
    if not 1 <= size <= 10_000 or not all(0 <= ms <= MOST_MS for ms in times):
        return None
    reason = found["reason"] if found["reason"] in REASONS else "other"
    return size, times[0] / 1000, times[1] / 1000, times[2] / 1000, reason, found["first"] == "1"
