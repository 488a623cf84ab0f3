"""Every metric that the activator exports, by name, with what it means. Times in seconds, as Prometheus wants them.

How many series there are does not depend on how many tenants and functions there are: the first `series` of each have series of their
own for as long as the process runs, and what comes after them is summed under `other` (activator.metrics_series).
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from activator.billing.shipping import Lag
from activator.dispatch import Exchange
from activator.routes import Target
from activator.shared.state import SharedStatistics
from pilotlight.errors import BudgetReserved, OverBudget, OverQuota, PilotlightError, Shed
from snapshotter.types import InstanceInfo

DEFAULT_SERIES = 1000
OTHER = "other"
_STATUSES_PER_FUNCTION = 24
"""A web application may answer with any of 500 statuses; what it adds to these is counted by its hundred, as `4xx`."""
_FUNCTION = ("tenant", "app", "function")
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Names:
    """The first `limit` names that come; all others are `other`. Safe from any thread: known names take no lock, new ones do."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[tuple[str, ...]] = set()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Names {len(self._known)}/{self._limit}>"

    def of(self, *labels: str) -> tuple[str, ...]:
        """The labels themselves, or as many `other`."""
        if labels in self._known:
            return labels
        with self._lock:
            if len(self._known) < self._limit:
                self._known.add(labels)
                return labels
        return (OTHER,) * len(labels)


class Metrics:
    """The activator's metrics in a registry of their own; `series` tenants and as many functions have some of their own."""

    def __init__(self, *, series: int = DEFAULT_SERIES) -> None:
        self.registry = CollectorRegistry()
        self._series = series
        self.tenants = Names(series)
        self.functions = Names(series)
        self._refusals = _Refusals(self.registry, self.tenants)
        self._cold = Counter(
            "pilotlight_cold_calls",
            "Calls that waited for a start, by the rung it took.",
            (*_FUNCTION, "start_kind"),
            registry=self.registry,
        )
        self._start = Histogram(
            "pilotlight_start_seconds", "Time to bring an instance up, by rung.", (*_FUNCTION, "start_kind"), buckets=_FAST,
            registry=self.registry,
        )  # fmt: skip
        self._start_phase = Counter(
            "pilotlight_start_phase_seconds",
            "Time spent in each phase of starts, by rung.",
            ("start_kind", "phase"),
            registry=self.registry,
        )
        self._start_failures = Counter(
            "pilotlight_start_failures", "Starts that failed, by the error's code.", (*_FUNCTION, "code"), registry=self.registry
        )
        self._wait = Histogram(
            "pilotlight_priority_wait_seconds", "From arrival to a slot, of calls that did not find one free.", ("priority",),
            buckets=_FAST, registry=self.registry,
        )  # fmt: skip
        self._unbilled = Counter(
            "pilotlight_unbilled_calls",
            "Calls served although the journal could not be written (journal_full: serve).",
            registry=self.registry,
        )
        self._journal_lag_s = Gauge(
            "pilotlight_journal_lag_seconds", "Age of the oldest usage record not yet in the ledger.", registry=self.registry
        )
        self._journal_lag = Gauge("pilotlight_journal_lag_records", "Usage records not yet in the ledger.", registry=self.registry)
        self._by_function: dict[str, _FunctionTally] = {}
        self._by_labels: dict[tuple[str, ...], _FunctionTally] = {}
        self.registry.register(_CallCollector(self._by_labels))

    def __repr__(self) -> str:
        return f"<Metrics {len(self._by_labels)} functions>"

    def answered(self, exchange: Exchange, status: int) -> None:
        """A call got a worker's answer."""
        call = exchange.call
        self.answered_warm(call.target, status, exec_s=exchange.exec_ms / 1000, queued_s=call.queued_ms / 1000)
        if call.start_ms:
            self._cold.labels(*self._labels(call.target), call.start_kind.value).inc()

    def waited(self, priority: str, seconds: float) -> None:
        """A call of this priority got a slot after waiting for it."""
        self._wait.labels(priority).observe(seconds)

    def answered_warm(self, target: Target, status: int, *, exec_s: float, queued_s: float = 0.0) -> None:
        """A call that waited for no start got a worker's answer."""
        tally = self._by_function.get(target.function_id)
        if tally is None:
            tally = self._tally(target)
        statuses = tally.statuses
        if status in statuses or len(statuses) < _STATUSES_PER_FUNCTION:
            statuses[status] = statuses.get(status, 0) + 1
        else:
            tally.rare[status // 100] = tally.rare.get(status // 100, 0) + 1
        tally.queue_wait.observe(queued_s)
        tally.execution.observe(exec_s)

    def refused(self, status: int) -> None:
        """A request was answered with an error of the platform's."""
        self._refusals.counted(status)

    def turned_away(self, error: PilotlightError, tenant: str) -> None:
        """The same, with the reason: quota, budget or shedding, and whose (the tenant's id; "" when nobody knows)."""
        self._refusals.counted(error.status)
        self._refusals.explained(error, tenant)

    def unbilled(self) -> None:
        """A call was served without a record of it."""
        self._unbilled.inc()

    def instance_ready(self, target: Target, info: InstanceInfo, seconds: float) -> None:
        """An instance came up."""
        self._start.labels(*self._labels(target), info.start_kind.value).observe(seconds)
        for phase, ms in info.phases_ms.items():
            self._start_phase.labels(info.start_kind.value, phase).inc(ms / 1000)

    def start_failed(self, target: Target, code: str) -> None:
        """A start failed."""
        self._start_failures.labels(*self._labels(target), code).inc()

    def collect_journal(self, lag: Callable[[], Lag]) -> None:
        """Export how far the ledger is behind, read when scraped."""
        self._journal_lag.set_function(lambda: lag().records)
        self._journal_lag_s.set_function(lambda: lag().seconds)

    def collect_instances(self, states: Callable[[], Mapping[tuple[str, str, str, str], int]]) -> None:
        """Export instances by state, read when scraped; keys are (tenant, app, function, state)."""
        self.registry.register(_InstanceCollector(states, self.functions))

    def collect_waiting(self, waiting: Callable[[], Mapping[tuple[str, str], int]]) -> None:
        """Export calls that wait for a slot, read when scraped; keys are (tenant, priority)."""
        self.registry.register(_WaitingCollector(waiting, self.tenants))

    def collect_tenants(self, names: Callable[[], Mapping[str, str]]) -> None:
        """Export names of tenants by their ids, read when scraped: queries join them to what is counted by id."""
        self.registry.register(_TenantCollector(names, self.tenants))

    def collect_shared(self, statistics: Callable[[], SharedStatistics]) -> None:
        """Export what several activators share, read when scraped."""
        self.registry.register(_SharedCollector(statistics, self._series))

    def _labels(self, target: Target) -> tuple[str, ...]:
        return self.functions.of(target.tenant, target.app, target.function)

    def _tally(self, target: Target) -> _FunctionTally:
        labels = self._labels(target)
        tally = self._by_labels.get(labels)
        if tally is None:
            tally = self._by_labels[labels] = _FunctionTally(labels)
        self._by_function[target.function_id] = tally
        return tally


class _Refusals:
    """Requests that got no worker's answer, and why."""

    def __init__(self, registry: CollectorRegistry, tenants: Names) -> None:
        self._tenants = tenants
        self._refused = Counter(
            "pilotlight_requests_refused", "Requests answered with an error before or instead of a worker's answer.", ("status",),
            registry=registry,
        )  # fmt: skip
        self._quota = Counter("pilotlight_quota_refusals", "Calls over a quota, by its name.", ("tenant", "of", "quota"), registry=registry)
        self._shed = Counter(
            "pilotlight_shed_calls", "Calls that gave their place in the queue to others.", ("tenant", "priority"), registry=registry
        )
        self._budget = Counter(
            "pilotlight_budget_refusals", "Calls refused for a budget: `over-budget` (402) or `budget-reserved` (429).", ("tenant", "type"),
            registry=registry,
        )  # fmt: skip

    def counted(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def explained(self, error: PilotlightError, tenant: str) -> None:
        (name,) = self._tenants.of(tenant)
        if isinstance(error, OverQuota):
            self._quota.labels(name, str(error.detail.get("of", "")), str(error.detail.get("quota", ""))).inc()
        elif isinstance(error, Shed):
            self._shed.labels(name, str(error.detail.get("priority", ""))).inc()
        elif isinstance(error, OverBudget | BudgetReserved):
            self._budget.labels(name, error.type).inc()


class _Tally:
    """A histogram that costs a call one bisection: the hot path cannot afford a lock for each of a dozen numbers."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(_FAST) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(_FAST, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as Prometheus wants them."""
        bounds = [str(bound) for bound in _FAST] + ["+Inf"]
        return list(zip(bounds, accumulate(self.counts), strict=True))


class _FunctionTally:
    """What is counted for each call of one function. Owner: the event loop; read by the metrics thread, which may see it a call late."""

    __slots__ = ("execution", "labels", "queue_wait", "rare", "statuses")

    def __init__(self, labels: tuple[str, ...]) -> None:
        self.labels = labels
        self.statuses: dict[int, int] = {}
        self.rare: dict[int, int] = {}
        self.queue_wait = _Tally()
        self.execution = _Tally()

    def by_status(self) -> Iterator[tuple[str, int]]:
        """Counts by status, or by its hundred."""
        for status, count in list(self.statuses.items()):
            yield str(status), count
        for hundred, count in list(self.rare.items()):
            yield f"{hundred}xx", count


class _CallCollector(Collector):
    def __init__(self, tallies: Mapping[tuple[str, ...], _FunctionTally]) -> None:
        self._tallies = tallies

    def collect(self) -> Iterator[CounterMetricFamily | HistogramMetricFamily]:
        """Current values (Prometheus' own interface)."""
        requests = CounterMetricFamily("pilotlight_requests", "Calls answered, by status.", labels=(*_FUNCTION, "status"))
        queue = HistogramMetricFamily(
            "pilotlight_queue_wait_seconds", "From arrival to a slot, without the start waited for.", labels=_FUNCTION
        )
        execution = HistogramMetricFamily("pilotlight_execution_seconds", "From dispatch to the last byte.", labels=_FUNCTION)
        for tally in list(self._tallies.values()):
            for status, count in tally.by_status():
                requests.add_metric((*tally.labels, status), count)
            queue.add_metric(tally.labels, tally.queue_wait.buckets(), tally.queue_wait.total)
            execution.add_metric(tally.labels, tally.execution.buckets(), tally.execution.total)
        yield from (requests, queue, execution)


class _InstanceCollector(Collector):
    def __init__(self, states: Callable[[], Mapping[tuple[str, str, str, str], int]], functions: Names) -> None:
        self._states = states
        self._functions = functions

    def collect(self) -> list[GaugeMetricFamily]:
        """Current counts (Prometheus' own interface)."""
        family = GaugeMetricFamily(
            "pilotlight_instances",
            "Instances by state; calls_waiting and calls_in_flight are calls, starts_held_up starts that wait for a quota or for room.",
            labels=(*_FUNCTION, "state"),
        )
        return [_summed(family, (((*self._functions.of(*labels[:3]), labels[3]), count) for labels, count in self._states().items()))]


class _WaitingCollector(Collector):
    def __init__(self, waiting: Callable[[], Mapping[tuple[str, str], int]], tenants: Names) -> None:
        self._waiting = waiting
        self._tenants = tenants

    def collect(self) -> list[GaugeMetricFamily]:
        """Current counts (Prometheus' own interface)."""
        family = GaugeMetricFamily("pilotlight_waiting_calls", "Calls that wait for a slot.", labels=("tenant", "priority"))
        return [_summed(family, (((*self._tenants.of(tenant), priority), count) for (tenant, priority), count in self._waiting().items()))]


class _TenantCollector(Collector):
    def __init__(self, names: Callable[[], Mapping[str, str]], tenants: Names) -> None:
        self._names = names
        self._tenants = tenants

    def collect(self) -> list[GaugeMetricFamily]:
        """Those that have series of their own, and `other`, so that joins keep it (Prometheus' own interface)."""
        family = GaugeMetricFamily("pilotlight_tenant", "1 for each tenant, with its name.", labels=("tenant", "name"))
        for tenant, name in self._names().items():
            if self._tenants.of(tenant) == (tenant,):
                family.add_metric((tenant, name), 1)
        family.add_metric((OTHER, OTHER), 1)
        return [family]


def _summed(family: GaugeMetricFamily, values: Iterable[tuple[tuple[str, ...], float]]) -> GaugeMetricFamily:
    """`family` with the sums of `values` by their labels: several may have come to be `other`."""
    sums: dict[tuple[str, ...], float] = {}
    for labels, value in values:
        sums[labels] = sums.get(labels, 0) + value
    for labels, value in sums.items():
        family.add_metric(labels, value)
    return family


class _SharedCollector(Collector):
    def __init__(self, statistics: Callable[[], SharedStatistics], series: int) -> None:
        self._statistics = statistics
        self._series = series

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Current values (Prometheus' own interface)."""
        now = self._statistics()
        yield GaugeMetricFamily("pilotlight_activator_members", "Activators that live, as this one sees it.", value=now.members)
        yield GaugeMetricFamily("pilotlight_shared_state_up", "1 while the shared state (Redis) answers.", value=int(now.is_reachable))
        yield CounterMetricFamily(
            "pilotlight_allowance_refused", "Starts that had to wait because other activators hold the instances.", value=now.refused
        )
        allowance = GaugeMetricFamily("pilotlight_instance_allowance", "Instances that this activator may hold now.", labels=("revision",))
        own = dict(list(now.allowance.items())[: self._series])
        for revision, count in own.items():
            allowance.add_metric((revision,), count)
        if len(own) < len(now.allowance):
            allowance.add_metric((OTHER,), sum(now.allowance.values()) - sum(own.values()))
        yield allowance
