"""Counters of calls: plain numbers to which calls add at their end.

Collectors read them at a scrape (`collectors`), and the controller gets those of each revision once
a second (`call_stats`). Owner: the event loop; the metrics thread may read them one call late."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from prometheus_client.samples import Exemplar

from activator.call_stats.observer import StatsBucket, stages_before
from pilotlight.spec.observations import LATENCY_BOUNDS
from pilotlight.spec.policies import DEFAULT_OBJECTIVES

if TYPE_CHECKING:
    from activator.calls.call import AnsweredCall

FAST = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
OTHER = "other"
FUNCTION = ("tenant", "app", "function")
"""Labels of metrics by function."""
STATUSES_PER_FUNCTION = 24
"""Maximum distinct statuses: a web application may use any of 500. Further ones are counted by
their hundred, as `4xx`."""


class LabelLimiter:
    """Passes the first `limit` names; all others become `other`. Thread-safe: known names take no
    lock, new ones do."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[tuple[str, ...]] = set()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<LabelLimiter {len(self._known)}/{self._limit}>"

    def of(self, *labels: str) -> tuple[str, ...]:
        """Return the labels themselves, or as many `other`."""
        if labels in self._known:
            return labels
        with self._lock:
            if len(self._known) < self._limit:
                self._known.add(labels)
                return labels
        return (OTHER,) * len(labels)

    def names(self) -> set[tuple[str, ...]]:
        """Return the labels that have series of their own."""
        with self._lock:
            return set(self._known)

    def forget(self, labels: tuple[str, ...]) -> None:
        """Make room for other labels."""
        with self._lock:
            self._known.discard(labels)


class DurationTally:
    """A histogram of seconds that costs a call one bisection: a lock for each of a dozen numbers is
    too slow for the hot path."""

    __slots__ = ("counts", "exemplars", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(FAST) + 1)
        self.total = 0.0
        self.exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(FAST, value)] += 1
        self.total += value

    def exemplify(self, value: float, trace_id: str, at: float) -> None:
        """Attach a kept trace to a value's bucket, shown in OpenMetrics."""
        self.exemplars[bisect_left(FAST, value)] = Exemplar({"trace_id": trace_id}, value, at)

    def buckets(self) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
        """Cumulative counts by upper bound, as Prometheus requires, with their exemplars."""
        bounds = [str(bound) for bound in FAST] + ["+Inf"]
        pairs = enumerate(zip(bounds, accumulate(self.counts), strict=True))
        return [(*pair, self.exemplars[n]) if n in self.exemplars else pair for n, pair in pairs]


class FunctionTally:
    """Counters of the calls of one function, since the start."""

    __slots__ = ("execution", "labels", "queue_wait", "rare", "statuses")

    def __init__(self, labels: tuple[str, ...]) -> None:
        self.labels = labels
        self.statuses: dict[int, int] = {}
        self.rare: dict[int, int] = {}
        self.queue_wait = DurationTally()
        self.execution = DurationTally()

    def answered(self, status: int, exec_s: float, queued_s: float = 0.0) -> None:
        """Count a call that a worker answered."""
        self.count(status)
        self.queue_wait.observe(queued_s)
        self.execution.observe(exec_s)

    def count(self, status: int) -> None:
        """Count an answered call, without its durations."""
        if status in self.statuses:
            self.statuses[status] += 1
        elif len(self.statuses) < STATUSES_PER_FUNCTION:
            self.statuses[status] = 1
        else:
            self.rare[status // 100] = self.rare.get(status // 100, 0) + 1

    def by_status(self) -> Iterator[tuple[str, int]]:
        """Counts by status, or by its hundred."""
        for status, count in list(self.statuses.items()):
            yield str(status), count
        for hundred, count in list(self.rare.items()):
            yield f"{hundred}xx", count


_NO_FUNCTION: Final = FunctionTally(())
_DRAINED: Final = StatsBucket(DEFAULT_OBJECTIVES)
_DRAINED.is_drained = True


class WarmCounters:
    """Where the calls of one revision and arm are counted that waited for nothing. Routes of the
    fast path have it, so that a call looks nothing up."""

    __slots__ = ("_function", "_function_of", "_revision", "_revision_of")

    def __init__(
        self,
        *,
        function_of: Callable[[], FunctionTally],
        revision_of: Callable[[], StatsBucket],
    ) -> None:
        """Both are called for the first call, and for the first one after the counts of the
        revision were drained."""
        self._function_of = function_of
        self._revision_of = revision_of
        self._function = _NO_FUNCTION
        self._revision = _DRAINED

    def __repr__(self) -> str:
        return f"<WarmCounters {self._function.labels} {self._revision!r}>"

    def answered(self, attempt: AnsweredCall, status: int) -> None:
        """Count an attempt that was answered whole, with a status below 400, and is closed:
        `Metrics.answered` in one step."""
        if self._revision.is_drained:
            self._function, self._revision = self._function_of(), self._revision_of()
        function, revision, exec_ms = self._function, self._revision, attempt.exec_ms
        exec_s = exec_ms / 1000
        statuses, execution = function.statuses, function.execution
        if status in statuses:
            statuses[status] += 1
            function.queue_wait.counts[0] += 1
            execution.counts[bisect_left(FAST, exec_s)] += 1
            execution.total += exec_s
        else:
            function.answered(status, exec_s)
        call = attempt.call
        before_ms = (attempt.dispatched_ns - call.began_ns) / 1e6
        revision.cost_picos += attempt.picos
        revision.exec_ms += exec_ms
        revision.warm[bisect_left(LATENCY_BOUNDS, before_ms + exec_ms)] += 1
        revision.exec[bisect_left(LATENCY_BOUNDS, exec_ms)] += 1
        if exec_ms > revision.exec_budget_ms:
            revision.overruns["exec"] = revision.overruns.get("exec", 0) + 1
        if before_ms > revision.at_once_ms:
            revision.delayed += 1
            revision.stages(stages_before(call, attempt.dispatched_ns))
