"""Collectors that Prometheus scrapes. They read the activator's own counters (`call_counters`), so
that calls only pay for plain additions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from activator.coordination.state import SharedStatistics
from activator.metrics.call_counters import FUNCTION, OTHER, FunctionTally, LabelLimiter


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
