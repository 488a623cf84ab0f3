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

The first SERIES tenants and budgets have separate series; further ones are counted as `other`
(spend) or omitted (budgets)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pilotlight.controller.server.health import Probes
from pilotlight.core.metrics_server import MetricsAddress, MetricsServer

_PREFIX = "pilotlight_controller_"
_PICOS = 10**12
SERIES = 1000
OTHER = "other"


class Metrics:
    """The controller's metrics registry. Thread-safe."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            _PREFIX + "requests", "Responses", ["route", "status"], registry=registry
        )
        self.request_seconds = Histogram(
            _PREFIX + "request_seconds", "Time to the first byte", ["route"], registry=registry
        )
        self.deploys = Counter(_PREFIX + "deploys", "Successful deploys", registry=registry)
        self.feed_followers = Gauge(
            _PREFIX + "feed_followers", "Waiting long polls", registry=registry
        )
        self.feed_changes = Counter(
            _PREFIX + "feed_changes", "Changes sent to followers", registry=registry
        )
        self.usage_records = Counter(
            _PREFIX + "usage_records", "New usage records", registry=registry
        )
        self.usage_conflicts = Counter(
            _PREFIX + "usage_conflicts",
            "Usage ids that arrived with different content",
            registry=registry,
        )
        self.blob_bytes = Counter(
            _PREFIX + "blob_bytes", "Bytes of blobs received", registry=registry
        )
        self.blobs_deleted = Counter(
            _PREFIX + "blobs_deleted", "Unreferenced blobs deleted", registry=registry
        )
        self.blob_bytes_deleted = Counter(
            _PREFIX + "blob_bytes_deleted", "Bytes of deleted blobs", registry=registry
        )
        self.alerts = Counter(
            _PREFIX + "alerts", "Attempts to deliver to webhooks", ["outcome"], registry=registry
        )
        self._spend = Counter(
            _PREFIX + "spend",
            "Cost of new usage records",
            ["tenant", "currency"],
            registry=registry,
        )
        self._budgets = Gauge(
            _PREFIX + "budget_used_ratio",
            "Spent share of a budget in its current period",
            ["tenant", "budget"],
            registry=registry,
        )
        self._in_cluster = Gauge(
            _PREFIX + "cluster_functions", "Functions in a cluster", ["phase"], registry=registry
        )
        self._foreign_namespaces = Gauge(
            _PREFIX + "cluster_foreign_namespaces",
            "Tenants' namespaces of another platform",
            registry=registry,
        )
        self.probes = Probes()
        self._tenants: set[str] = set()
        self._known_budgets: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

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

    async def expose(self, address: MetricsAddress) -> list[asyncio.Server]:
        """Serve the metrics as Prometheus text, and the health probes. Raises SettingsInvalid when
        the address is not available."""

        async def probe(path: str) -> tuple[int, str] | None:
            return await self.probes.answer(path)

        return await MetricsServer(registry=self.registry, probe=probe).serve(address)
