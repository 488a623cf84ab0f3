"""Every metric that the activator exports, by name, with what it means. Times in seconds, as Prometheus wants them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from activator.billing.shipping import Lag
from activator.dispatch import Exchange
from activator.routes import Target
from activator.shared.state import SharedStatistics
from snapshotter.types import InstanceInfo

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """The activator's metrics in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        function = ("tenant", "app", "function")
        self._refused = Counter(
            "pilotlight_requests_refused", "Requests answered with an error before or instead of a worker's answer.", ("status",),
            registry=self.registry,
        )  # fmt: skip
        self._cold = Counter(
            "pilotlight_cold_calls",
            "Calls that waited for a start, by the rung it took.",
            (*function, "start_kind"),
            registry=self.registry,
        )
        self._start = Histogram(
            "pilotlight_start_seconds", "Time to bring an instance up, by rung.", (*function, "start_kind"), buckets=_FAST,
            registry=self.registry,
        )  # fmt: skip
        self._start_phase = Counter(
            "pilotlight_start_phase_seconds",
            "Time spent in each phase of starts, by rung.",
            ("start_kind", "phase"),
            registry=self.registry,
        )
        self._start_failures = Counter(
            "pilotlight_start_failures", "Starts that failed, by the error's code.", (*function, "code"), registry=self.registry
        )
        self._journal_lag_s = Gauge(
            "pilotlight_journal_lag_seconds", "Age of the oldest usage record not yet in the ledger.", registry=self.registry
        )
        self._journal_lag = Gauge("pilotlight_journal_lag_records", "Usage records not yet in the ledger.", registry=self.registry)
        self._by_target: dict[str, _FunctionTally] = {}
        self.registry.register(_CallCollector(self._by_target))

    def __repr__(self) -> str:
        return f"<Metrics {len(self._by_target)} functions>"

    def answered(self, exchange: Exchange, status: int) -> None:
        """A call got a worker's answer."""
        call = exchange.call
        self.answered_warm(call.target, status, exec_s=exchange.exec_ms / 1000, queued_s=call.queued_ms / 1000)
        if call.start_ms:
            self._cold.labels(call.target.tenant, call.target.app, call.target.function, call.start_kind.value).inc()

    def answered_warm(self, target: Target, status: int, *, exec_s: float, queued_s: float = 0.0) -> None:
        """A call that waited for no start got a worker's answer."""
        tally = self._by_target.get(target.function_id)
        if tally is None:
            tally = self._by_target[target.function_id] = _FunctionTally(target)
        statuses = tally.statuses
        statuses[status] = statuses.get(status, 0) + 1
        tally.queue_wait.observe(queued_s)
        tally.execution.observe(exec_s)

    def refused(self, status: int) -> None:
        """A request was answered with an error of the platform's."""
        self._refused.labels(str(status)).inc()

    def instance_ready(self, target: Target, info: InstanceInfo, seconds: float) -> None:
        """An instance came up."""
        self._start.labels(target.tenant, target.app, target.function, info.start_kind.value).observe(seconds)
        for phase, ms in info.phases_ms.items():
            self._start_phase.labels(info.start_kind.value, phase).inc(ms / 1000)

    def start_failed(self, target: Target, code: str) -> None:
        """A start failed."""
        self._start_failures.labels(target.tenant, target.app, target.function, code).inc()

    def collect_journal(self, lag: Callable[[], Lag]) -> None:
        """Export how far the ledger is behind, read when scraped."""
        self._journal_lag.set_function(lambda: lag().records)
        self._journal_lag_s.set_function(lambda: lag().seconds)

    def collect_instances(self, states: Callable[[], Mapping[tuple[str, str, str, str], int]]) -> None:
        """Export instances by state, read when scraped; keys are (tenant, app, function, state)."""
        self.registry.register(_InstanceCollector(states))

    def collect_shared(self, statistics: Callable[[], SharedStatistics]) -> None:
        """Export what several activators share, read when scraped."""
        self.registry.register(_SharedCollector(statistics))


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

    __slots__ = ("execution", "labels", "queue_wait", "statuses")

    def __init__(self, target: Target) -> None:
        self.labels = (target.tenant, target.app, target.function)
        self.statuses: dict[int, int] = {}
        self.queue_wait = _Tally()
        self.execution = _Tally()


class _CallCollector(Collector):
    def __init__(self, tallies: Mapping[str, _FunctionTally]) -> None:
        self._tallies = tallies

    def collect(self) -> Iterator[CounterMetricFamily | HistogramMetricFamily]:
        """Current values (Prometheus' own interface)."""
        function = ("tenant", "app", "function")
        requests = CounterMetricFamily("pilotlight_requests", "Calls answered, by status.", labels=(*function, "status"))
        queue = HistogramMetricFamily(
            "pilotlight_queue_wait_seconds", "From arrival to a slot, without the start waited for.", labels=function
        )
        execution = HistogramMetricFamily("pilotlight_execution_seconds", "From dispatch to the last byte.", labels=function)
        for tally in list(self._tallies.values()):
            for status, count in list(tally.statuses.items()):
                requests.add_metric((*tally.labels, str(status)), count)
            queue.add_metric(tally.labels, tally.queue_wait.buckets(), tally.queue_wait.total)
            execution.add_metric(tally.labels, tally.execution.buckets(), tally.execution.total)
        yield from (requests, queue, execution)


class _InstanceCollector(Collector):
    def __init__(self, states: Callable[[], Mapping[tuple[str, str, str, str], int]]) -> None:
        self._states = states

    def collect(self) -> list[GaugeMetricFamily]:
        """Current counts (Prometheus' own interface)."""
        family = GaugeMetricFamily(
            "pilotlight_instances",
            "Instances by state; calls_waiting and calls_in_flight are calls.",
            labels=("tenant", "app", "function", "state"),
        )
        for labels, count in self._states().items():
            family.add_metric(labels, count)
        return [family]


class _SharedCollector(Collector):
    def __init__(self, statistics: Callable[[], SharedStatistics]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Current values (Prometheus' own interface)."""
        now = self._statistics()
        yield GaugeMetricFamily("pilotlight_activator_members", "Activators that live, as this one sees it.", value=now.members)
        yield GaugeMetricFamily("pilotlight_shared_state_up", "1 while the shared state (Redis) answers.", value=int(now.is_reachable))
        yield CounterMetricFamily(
            "pilotlight_allowance_refused", "Starts that had to wait because other activators hold the instances.", value=now.refused
        )
        allowance = GaugeMetricFamily("pilotlight_instance_allowance", "Instances that this activator may hold now.", labels=("revision",))
        for revision, count in now.allowance.items():
            allowance.add_metric((revision,), count)
        yield allowance
