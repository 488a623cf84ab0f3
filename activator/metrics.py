"""Every metric that the activator exports, by name, with what it means. Times in seconds, as Prometheus wants them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from activator.dispatch import Exchange
from activator.instances import Instance
from activator.routes import Target
from snapshotter.types import InstanceInfo

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """The activator's metrics in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        function = ("tenant", "app", "function")
        self._requests = Counter(
            "pilotlight_requests", "Calls answered, by status.", (*function, "status"), registry=self.registry
        )
        self._refused = Counter(
            "pilotlight_requests_refused", "Requests answered with an error before or instead of a worker's answer.", ("status",),
            registry=self.registry,
        )  # fmt: skip
        self._queue_wait = Histogram(
            "pilotlight_queue_wait_seconds", "From arrival to a slot, without the start waited for.", function, buckets=_FAST,
            registry=self.registry,
        )  # fmt: skip
        self._execution = Histogram(
            "pilotlight_execution_seconds", "From dispatch to the last byte.", function, buckets=_FAST, registry=self.registry
        )
        self._cold = Counter(
            "pilotlight_cold_calls", "Calls that waited for a start, by the rung it took.", (*function, "start_kind"), registry=self.registry
        )
        self._start = Histogram(
            "pilotlight_start_seconds", "Time to bring an instance up, by rung.", (*function, "start_kind"), buckets=_FAST,
            registry=self.registry,
        )  # fmt: skip
        self._start_phase = Counter(
            "pilotlight_start_phase_seconds", "Time spent in each phase of starts, by rung.", ("start_kind", "phase"), registry=self.registry
        )
        self._start_failures = Counter(
            "pilotlight_start_failures", "Starts that failed, by the error's code.", (*function, "code"), registry=self.registry
        )
        self._journal_lag_s = Gauge(
            "pilotlight_journal_lag_seconds", "Age of the oldest usage record not yet in the ledger.", registry=self.registry
        )
        self._journal_lag = Gauge("pilotlight_journal_lag_records", "Usage records not yet in the ledger.", registry=self.registry)
        self._by_target: dict[str, _TargetMetrics] = {}

    def __repr__(self) -> str:
        return f"<Metrics {len(self._by_target)} functions>"

    def answered(self, exchange: Exchange, status: int) -> None:
        """A call got a worker's answer."""
        call = exchange.call
        of = self._of(call.target)
        of.count(status)
        of.queue_wait(call.queued_ms / 1000)
        of.execution(exchange.exec_ms / 1000)
        if call.start_ms:
            self._cold.labels(call.target.tenant, call.target.app, call.target.function, call.start_kind.value).inc()

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

    def journal_lag(self, *, records: int, seconds: float) -> None:
        """How far the ledger is behind."""
        self._journal_lag.set(records)
        self._journal_lag_s.set(seconds)

    def collect_instances(self, states: Callable[[], Mapping[tuple[str, str, str, str], int]]) -> None:
        """Export instances by state, read when scraped; keys are (tenant, app, function, state)."""
        self.registry.register(_InstanceCollector(states))

    def _of(self, target: Target) -> _TargetMetrics:
        of = self._by_target.get(target.function_id)
        if of is None:
            labels = (target.tenant, target.app, target.function)
            of = self._by_target[target.function_id] = _TargetMetrics(
                self._requests, self._queue_wait.labels(*labels), self._execution.labels(*labels), labels
            )
        return of


class _TargetMetrics:
    """Resolved children of one function, so that a call costs no label look-up."""

    __slots__ = ("_labels", "_requests", "_statuses", "execution", "queue_wait")

    def __init__(self, requests: Counter, queue_wait: Histogram, execution: Histogram, labels: tuple[str, str, str]) -> None:
        self._requests = requests
        self._labels = labels
        self._statuses: dict[int, Counter] = {}
        self.queue_wait = queue_wait.observe
        self.execution = execution.observe

    def count(self, status: int) -> None:
        child = self._statuses.get(status)
        if child is None:
            child = self._statuses[status] = self._requests.labels(*self._labels, str(status))
        child.inc()


class _InstanceCollector(Collector):
    def __init__(self, states: Callable[[], Mapping[tuple[str, str, str, str], int]]) -> None:
        self._states = states

    def collect(self) -> list[GaugeMetricFamily]:
        """Current counts (Prometheus' own interface)."""
        family = GaugeMetricFamily(
            "pilotlight_instances", "Instances by state; waiting and in_flight are calls.", labels=("tenant", "app", "function", "state")
        )
        for labels, count in self._states().items():
            family.add_metric(labels, count)
        return [family]


class InstanceObserver:
    """What throttlers tell, passed on to metrics and to the idle meter."""

    def __init__(self, metrics: Metrics, on_idle: Callable[[Target, Instance, float, float], None]) -> None:
        self._metrics = metrics
        self._on_idle = on_idle

    def instance_ready(self, target: Target, info: InstanceInfo, seconds: float) -> None:
        """See throttler.StartObserver."""
        self._metrics.instance_ready(target, info, seconds)

    def start_failed(self, target: Target, code: str) -> None:
        """See throttler.StartObserver."""
        self._metrics.start_failed(target, code)

    def instance_idle(self, target: Target, instance: Instance, idle_from: float, idle_to: float) -> None:
        """See throttler.StartObserver."""
        self._on_idle(target, instance, idle_from, idle_to)
