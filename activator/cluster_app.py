"""Builds the objects that only the activators of a cluster have: the fleet of pods, their
autoscaler, and the connections on which pods send calls of their functions. Nothing runs yet.

`activator.app` builds all others, and connects these to them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from activator.autoscaler.autoscaler_loop import AutoscalerLoop
from activator.balancing.throttler_stats import calls_per_instance, desired_pods_hint
from activator.context import ActivatorContext
from activator.coordination.state import platform_id
from activator.gateway.instance_sockets import InstanceSockets
from activator.gateway.pod_connections import PodConnections
from activator.knative.app import FleetContext, cluster_parts
from activator.knative.autoscaler.load_report import Statement
from activator.knative.autoscaler.load_reporter import loads_of
from activator.knative.lazy_client import LazyCluster
from activator.knative.pod_statements import PodStatements
from activator.knative.pod_watcher import Pod
from activator.routing.route_table import RouteTable
from activator.settings import ActivatorSettings
from pilotlight.core.settings import SettingsInvalid
from pilotlight.core.transport.listeners import open_tcp_listener
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.function import FunctionSpec

if TYPE_CHECKING:
    from activator.coordination.redis_state import RedisState
    from activator.knative.autoscaler.app import Autoscaler


class ClusterApp:
    """The objects of one activator whose instances are pods. Owner: the event loop.

    Attributes:
        fleet: the pods.
        autoscaler: of class `pilotlight.dev`; None = Knative's own scales.
        early_loops, loops, closing: as of `activator.app.ActivatorApp`."""

    def __init__(
        self,
        cluster: ClusterSettings,
        *,
        context: ActivatorContext,
        settings: ActivatorSettings,
        shared: RedisState | None,
        table: RouteTable,
        scaler: Callable[[], AutoscalerLoop],
    ) -> None:
        """`shared`: state of several activators. `scaler`: is made after the fleet."""
        self._context = context
        self._settings = settings
        self._shared = shared
        self._table = table
        self._scaler = scaler
        self.early_loops: list[tuple[str, Callable[[], Coroutine[Any, Any, None]]]] = []
        self.loops: list[tuple[str, Callable[[], Coroutine[Any, Any, None]]]] = []
        self.closing: list[Callable[[], Awaitable[None]]] = []
        self._redis_url = settings.redis_url if shared is not None else None
        self.autoscaler = None if cluster.uses_kpa else self._make_autoscaler(cluster)
        parts = cluster_parts(cluster, self._fleet_context())
        self.fleet = parts.fleet
        self._agents = parts.agents
        self.early_loops.append(("cluster", parts.fleet.run))
        if settings.agents_listen is not None:
            self.early_loops.append(("node agents", lambda: parts.agents.follow(parts.cluster)))
        self.loops.append(("deletion costs", parts.deletion_costs.run))
        if parts.handover is not None:
            self.loops.append(("hand-over", parts.handover.run))
        self.closing.append(parts.cluster.aclose)

    def __repr__(self) -> str:
        return f"<ClusterApp {self.fleet!r}>"

    def _fleet_context(self) -> FleetContext:
        return FleetContext(
            member=self._context.id,
            table=self._table,
            redis_url=self._redis_url,
            platform=platform_id(self._context.key.token),
            demand=None if self.autoscaler is None else self.autoscaler.reporter,
            waiting_of=lambda key: desired_pods_hint(self._scaler().active(key)),
            in_flight=lambda: calls_per_instance(self._scaler().throttlers()),
            revisions=self._scaler,
            controller=self._context.controller,
            token=self._context.key.token,
        )

    def _make_autoscaler(self, cluster: ClusterSettings) -> Autoscaler:
        """Build this activator's load reports, and its candidacy for leader."""
        # imported here because it takes a second, and only clusters with this class need it
        from activator.knative.autoscaler.app import Autoscaler, AutoscalerContext
        from activator.knative.autoscaler.leader import FunctionLister

        own, shared = LazyCluster(cluster), self._shared
        autoscaler_context = AutoscalerContext(
            member=self._context.id,
            redis_url=self._redis_url,
            platform=platform_id(self._context.key.token),
            is_known=lambda: self._scaler().reconciled,
            loads=self._loads,
            functions=FunctionLister(
                members=lambda: () if shared is None else shared.members(),
                pods_of=self._pods_of,
                has_function=self._table.has_function,
                spec_of=self._spec_of,
            ),
        )
        autoscaler = Autoscaler(cluster, own, autoscaler_context)
        self.loops.append(("autoscaler", autoscaler.run))
        self.closing += [autoscaler.aclose, own.aclose]
        return autoscaler

    def _loads(self) -> Statement:
        scaler, bridges = self._scaler(), self.fleet.claimed.promoted().values()
        return loads_of(
            scaler.throttlers(),
            scaler.concurrency(),
            self.fleet.claimed.by_uid(),
            time.monotonic(),
            promoted={held.pod.uid for pods in bridges for held in pods},
            promised=self.fleet.starts.promised,
        )

    def _pods_of(self, key: str) -> Sequence[Pod]:
        return self.fleet.pods.of(key)

    def _spec_of(self, tenant: str, key: str) -> FunctionSpec | None:
        target = self._table.target_keyed(tenant, key)
        return target.spec if target is not None else None

    def pod_connections(self, sockets: InstanceSockets) -> PodConnections:
        """Open `activator.agents_listen`, where node agents pass calls of functions on to
        `sockets`. Raises SettingsInvalid."""
        listen, credentials = self._settings.agents_listen, self._context.credentials
        assert listen is not None
        if credentials is None:
            raise SettingsInvalid(
                f"activator.agents_listen = {listen!r}: needs platform.tls_cert, tls_key and tls_ca"
            )
        return PodConnections(
            sockets,
            PodStatements(self.fleet.owned, self._agents),
            listener=open_tcp_listener("activator.agents_listen", listen),
            credentials=credentials,
        )
