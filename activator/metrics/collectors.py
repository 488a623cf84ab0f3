"""Collectors that Prometheus scrapes. They read the activator's own counters, so that calls only
pay for plain additions."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from activator.coordination.state import SharedStatistics

OTHER = "other"
FUNCTION = ("tenant", "app", "function")
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


class _Tally:
    """A histogram that costs a call one bisection: a lock for each of a dozen numbers is too slow
    for the hot path."""

    __slots__ = ("counts", "exemplars", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(FAST) + 1)
        self.total = 0.0
        self.exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float) -> None:
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
    """Counters of the calls of one function. Owner: the event loop; read by the metrics thread,
    possibly one call late."""

    __slots__ = ("execution", "labels", "queue_wait", "rare", "statuses")

    def __init__(self, labels: tuple[str, ...]) -> None:
        self.labels = labels
        self.statuses: dict[int, int] = {}
        self.rare: dict[int, int] = {}
        self.queue_wait = _Tally()
        self.execution = _Tally()

    def answered(self, status: int, exec_s: float, queued_s: float = 0.0) -> None:
        """Count a call that a worker answered."""
        statuses = self.statuses
        if status in statuses:
            statuses[status] += 1
        elif len(statuses) < STATUSES_PER_FUNCTION:
            statuses[status] = 1
        else:
            self.rare[status // 100] = self.rare.get(status // 100, 0) + 1
        if queued_s:
            self.queue_wait.observe(queued_s)
        else:
            self.queue_wait.counts[0] += 1
        execution = self.execution  # `observe`, inlined
        execution.counts[bisect_left(FAST, exec_s)] += 1
        execution.total += exec_s

    def by_status(self) -> Iterator[tuple[str, int]]:
        """Counts by status, or by its hundred."""
        for status, count in list(self.statuses.items()):
            yield str(status), count
        for hundred, count in list(self.rare.items()):
            yield f"{hundred}xx", count


class CallCollector(Collector):
    def __init__(self, tallies: Mapping[tuple[str, ...], FunctionTally]) -> None:
        self._tallies = tallies

    def collect(self) -> Iterator[CounterMetricFamily | HistogramMetricFamily]:
        """Current values (Prometheus' own interface)."""
        requests = CounterMetricFamily(
            "pilotlight_requests", "Calls answered, by status.", labels=(*FUNCTION, "status")
        )
        queue = HistogramMetricFamily(
            "pilotlight_queue_wait_seconds",
            "From arrival to a slot, without the start waited for.",
            labels=FUNCTION,
        )
        execution = HistogramMetricFamily(
            "pilotlight_execution_seconds", "From dispatch to the last byte.", labels=FUNCTION
        )
        for tally in list(self._tallies.values()):
            for status, count in tally.by_status():
                requests.add_metric((*tally.labels, status), count)
            queue.add_metric(tally.labels, tally.queue_wait.buckets(), tally.queue_wait.total)
            execution.add_metric(tally.labels, tally.execution.buckets(), tally.execution.total)
        yield from (requests, queue, execution)


class InstanceCollector(Collector):
    def __init__(
        self, states: Callable[[], Mapping[tuple[str, str, str, str], int]], functions: LabelLimiter
    ) -> None:
        self._states = states
        self._functions = functions

    def collect(self) -> list[GaugeMetricFamily]:
        """Current counts (Prometheus' own interface)."""
        family = GaugeMetricFamily(
            "pilotlight_instances",
            "Instances by state; calls_waiting and calls_in_flight are calls, starts_held_up "
            "starts that wait for a quota or for room, "
            "circuit_open revisions that get no calls because of failures.",
            labels=(*FUNCTION, "state"),
        )
        return [
            _summed(
                family,
                (
                    ((*self._functions.of(*labels[:3]), labels[3]), count)
                    for labels, count in self._states().items()
                ),
            )
        ]


class WaitingCollector(Collector):
    def __init__(
        self, waiting: Callable[[], Mapping[tuple[str, str], int]], tenants: LabelLimiter
    ) -> None:
        self._waiting = waiting
        self._tenants = tenants

    def collect(self) -> list[GaugeMetricFamily]:
        """Current counts (Prometheus' own interface)."""
        family = GaugeMetricFamily(
            "pilotlight_waiting_calls", "Calls that wait for a slot.", labels=("tenant", "priority")
        )
        return [
            _summed(
                family,
                (
                    ((*self._tenants.of(tenant), priority), count)
                    for (tenant, priority), count in self._waiting().items()
                ),
            )
        ]


class TenantCollector(Collector):
    def __init__(self, names: Callable[[], Mapping[str, str]], tenants: LabelLimiter) -> None:
        self._names = names
        self._tenants = tenants

    def collect(self) -> list[GaugeMetricFamily]:
        """Tenants with their own series, and `other`, so that joins keep it (Prometheus' own
        interface)."""
        family = GaugeMetricFamily(
            "pilotlight_tenant", "1 for each tenant, with its name.", labels=("tenant", "name")
        )
        for tenant, name in self._names().items():
            if self._tenants.of(tenant) == (tenant,):
                family.add_metric((tenant, name), 1)
        family.add_metric((OTHER, OTHER), 1)
        return [family]


def _summed(
    family: GaugeMetricFamily, values: Iterable[tuple[tuple[str, ...], float]]
) -> GaugeMetricFamily:
    """`family` with the sums of `values` by their labels: several may have become `other`."""
    sums: dict[tuple[str, ...], float] = {}
    for labels, value in values:
        sums[labels] = sums.get(labels, 0) + value
    for labels, value in sums.items():
        family.add_metric(labels, value)
    return family


class SharedCollector(Collector):
    def __init__(self, statistics: Callable[[], SharedStatistics], series: int) -> None:
        self._statistics = statistics
        self._series = series

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Current values (Prometheus' own interface)."""
        now = self._statistics()
        yield GaugeMetricFamily(
            "pilotlight_activator_members",
            "Living activators, as seen by this one.",
            value=now.members,
        )
        yield GaugeMetricFamily(
            "pilotlight_shared_state_up",
            "1 while the shared state (Redis) answers.",
            value=int(now.is_reachable),
        )
        yield CounterMetricFamily(
            "pilotlight_allowance_refused",
            "Starts that had to wait because other activators hold the instances.",
            value=now.refused,
        )
        allowance = GaugeMetricFamily(
            "pilotlight_instance_allowance",
            "Instances that this activator may hold now.",
            labels=("revision",),
        )
        own = dict(list(now.allowance.items())[: self._series])
        for revision, count in own.items():
            allowance.add_metric((revision,), count)
        if len(own) < len(now.allowance):
            allowance.add_metric((OTHER,), sum(now.allowance.values()) - sum(own.values()))
        yield allowance
