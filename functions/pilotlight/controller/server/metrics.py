"""The controller's metrics.

| name | type | labels | what |
|---|---|---|---|
| `pilotlight_controller_requests_total` | counter | `route`, `status` | responses |
| `pilotlight_controller_request_seconds` | histogram | `route` | time to the first byte of the response |
| `pilotlight_controller_deploys_total` | counter | - | successful deploys |
| `pilotlight_controller_feed_followers` | gauge | - | waiting long polls |
| `pilotlight_controller_feed_changes_total` | counter | - | changes sent |
| `pilotlight_controller_usage_records_total` | counter | - | new usage records |
| `pilotlight_controller_usage_conflicts_total` | counter | - | usage ids that arrived with different content: a defect of the sender |
| `pilotlight_controller_blob_bytes_total` | counter | - | bytes of blobs received |
| `pilotlight_controller_blobs_deleted_total` | counter | - | unreferenced blobs deleted |
| `pilotlight_controller_blob_bytes_deleted_total` | counter | - | their bytes |
| `pilotlight_controller_spend_total` | counter | `tenant`, `currency` | cost of new usage records |
| `pilotlight_controller_budget_used_ratio` | gauge | `tenant`, `budget` | spent share of a budget in its current period |
| `pilotlight_controller_alerts_total` | counter | `outcome` | attempts to deliver to webhooks, of budgets and named ones: `delivered`, `retried`, `given-up` |
| `pilotlight_controller_cluster_functions` | gauge | `phase` | functions in a cluster, from the leader: `ready`, `pending`, `failed` |
| `pilotlight_controller_cluster_foreign_namespaces` | gauge | - | tenants' namespaces of another platform: while there are any, the leader changes nothing in the cluster |
| `pilotlight_controller_warm_pods` | gauge | `shape`, `state` | pods of the pool, from the leader: `wanted`, `warm`, `starting`, `promoted` |
| `pilotlight_controller_promotions_total` | counter | `outcome` | requests for a warm pod: `promoted`, or why there was none (`empty`, `no-shape`, `quota`, …) |
| `pilotlight_controller_pod_resizes_total` | counter | `outcome` | promoted pods that got the size of their functions (`grown`, `shrunk`), or why not: `deferred`, `infeasible`, `unanswered` (by the kubelet), `refused` (by the API server), `failed` |
| `pilotlight_controller_drift_features` | gauge | `tenant`, `environment`, `app`, `function` | features, and the prediction, in drift in the last window |
| `pilotlight_controller_drift_psi` | gauge | the same | their greatest stability index |
| `pilotlight_controller_drift_quality` | gauge | the same | bounds of quality that are broken, slices included |

The first SERIES tenants, budgets and monitored functions have separate series; further ones are
counted as `other` (spend) or omitted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pilotlight.controller.server.health import Probes
from pilotlight.core.metrics_server import MetricsAddress, MetricsServer

_PREFIX = "pilotlight_controller_"
_PICOS = 10**12
SERIES = 1000
OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftSeries:
    """Metrics of one monitored function. `labels`: tenant, environment, app, function."""

    labels: tuple[str, str, str, str]
    drifted: int
    max_psi: float
    broken: int


class Metrics:
    """The controller's metrics registry. Thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = self._counter, self._gauge
        self.requests = counter("requests", "Responses", "route", "status")
        self.request_seconds = Histogram(
            _PREFIX + "request_seconds", "Time to the first byte", ["route"], registry=self.registry
        )
        self.deploys = counter("deploys", "Successful deploys")
        self.feed_followers = gauge("feed_followers", "Waiting long polls")
        self.feed_changes = counter("feed_changes", "Changes sent to followers")
        self.usage_records = counter("usage_records", "New usage records")
        self.usage_conflicts = counter(
            "usage_conflicts", "Usage ids that arrived with different content"
        )
        self.blob_bytes = counter("blob_bytes", "Bytes of blobs received")
        self.blobs_deleted = counter("blobs_deleted", "Unreferenced blobs deleted")
        self.blob_bytes_deleted = counter("blob_bytes_deleted", "Bytes of deleted blobs")
        self.alerts = counter("alerts", "Attempts to deliver to webhooks", "outcome")
        self._spend = counter("spend", "Cost of new usage records", "tenant", "currency")
        self._budgets = gauge(
            "budget_used_ratio", "Spent share of a budget in its current period", "tenant", "budget"
        )
        self.promotions = counter("promotions", "Requests for a warm pod", "outcome")
        self.pod_resizes = counter(
            "pod_resizes", "Promoted pods that were resized, or not", "outcome"
        )
        self._warm_pods = gauge("warm_pods", "Pods of the pool", "shape", "state")
        self._in_cluster = gauge("cluster_functions", "Functions in a cluster", "phase")
        self._foreign_namespaces = gauge(
            "cluster_foreign_namespaces", "Tenants' namespaces of another platform"
        )
        names = ("tenant", "environment", "app", "function")
        self._drifted = gauge("drift_features", "Features in drift in the last window", *names)
        self._psi = gauge("drift_psi", "Greatest population stability index", *names)
        self._broken = gauge("drift_quality", "Bounds of quality that are broken", *names)
        self.probes = Probes()
        self._tenants: set[str] = set()
        self._known_budgets: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(_PREFIX + name, text, labels, registry=self.registry)

    def record_spend(self, tenant: str, currency: str, picos: int) -> None:
        """Count the cost of new records, in picounits. Negative corrections are not counted: a
        counter only increases."""
        with self._lock:
            if tenant not in self._tenants and len(self._tenants) < SERIES:
                self._tenants.add(tenant)
            name = tenant if tenant in self._tenants else OTHER
        self._spend.labels(name, currency).inc(max(0, picos) / _PICOS)

    def set_cluster_functions(self, counts: Mapping[str, int]) -> None:
        """Set the number of the cluster's functions by phase."""
        for phase, count in counts.items():
            self._in_cluster.labels(phase).set(count)

    def set_foreign_namespaces(self, count: int) -> None:
        """Set the number of tenants' namespaces in the cluster that another platform owns."""
        self._foreign_namespaces.set(count)

    def set_warm_pods(self, counts: Mapping[str, Mapping[str, int]]) -> None:
        """Set the numbers of pods by shape and state; shapes that are gone have no series."""
        self._warm_pods.clear()
        for shape, states in counts.items():
            for state, count in states.items():
                self._warm_pods.labels(shape, state).set(count)

    def set_budget_used(self, tenant: str, budget: str, share: float) -> None:
        """Set the spent share of a budget (1 = all)."""
        with self._lock:
            if (tenant, budget) not in self._known_budgets and len(self._known_budgets) >= SERIES:
                return
            self._known_budgets.add((tenant, budget))
        self._budgets.labels(tenant, budget).set(share)

    def remove_budget(self, tenant: str, budget: str) -> None:
        """Remove the series of a deleted budget."""
        with self._lock:
            if (tenant, budget) in self._known_budgets:
                self._known_budgets.discard((tenant, budget))
                self._budgets.remove(tenant, budget)

    def set_drift(self, found: Sequence[DriftSeries]) -> None:
        """Set the metrics of monitored functions; those that are not in `found` have no series."""
        for one in (self._drifted, self._psi, self._broken):
            one.clear()
        for each in found[:SERIES]:
            self._drifted.labels(*each.labels).set(each.drifted)
            self._psi.labels(*each.labels).set(each.max_psi)
            self._broken.labels(*each.labels).set(each.broken)

    async def expose(self, address: MetricsAddress) -> list[asyncio.Server]:
        """Serve the metrics as Prometheus text, and the health probes. Raises SettingsInvalid when
        the address is not available."""

        async def probe(path: str) -> tuple[int, str] | None:
            return await self.probes.answer(path)

        return await MetricsServer(registry=self.registry, probe=probe).serve(address)
