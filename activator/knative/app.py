"""Creates the parts of a fleet of pods, in dependency order. Nothing runs yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from activator.knative.activation_requests import ActivationRequests, NamespacedName
from activator.knative.agent_addresses import AgentAddresses
from activator.knative.deletion_cost import DeletionCosts
from activator.knative.fleet import KnativeFleet
from activator.knative.forks.pod_forks import PodForks
from activator.knative.lazy_client import LazyCluster
from activator.knative.leases.pod_leases import InMemoryPodLeases, PodLeaseStore
from activator.knative.node_gpus import NodeGpus
from activator.knative.pod_registry import PodTargets
from activator.knative.pod_watcher import Pod, PodWatcher
from activator.knative.readiness_probe import PROXY_PORT, WORKER_PORT
from activator.knative.scale_request import ReportedDemand, ScaleDemand, ScaleRequester
from activator.knative.warm.handover_loop import CalledRevisions, HandoverLoop
from activator.knative.warm.promotion import WarmPods
from activator.knative.warm.waiting_starts import Promotions
from activator.routing.route_table import CallTarget, RouteTable
from pilotlight.core.transport.endpoint import Endpoint
from pilotlight.kubernetes import names
from pilotlight.kubernetes.settings import ClusterSettings

PATIENCE_S = 1.0
"""The least time that a promoted pod gets before a start requests another one: a restored worker
needs a fraction of it, and a pod that is not needed costs more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetContext:
    """What a fleet needs of its activator.

    Attributes:
        redis_url: where claims are shared; None = this is the only activator.
        platform: its name in that Redis.
        demand: receives the number of desired pods; None = Knative's autoscaler scales.
        waiting_of: number of calls of a revision (by key) that wait for an instance here.
        in_flight: number of calls in each of our instances, by its id.
        revisions: the revisions that are called here.
        controller, token: where warm pods are asked for."""

    member: str
    table: RouteTable
    redis_url: str | None
    platform: str
    demand: ScaleDemand | None
    waiting_of: Callable[[str], int]
    in_flight: Callable[[], Mapping[str, int]]
    revisions: Callable[[], CalledRevisions]
    controller: Endpoint
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterParts:
    """A fleet and its companion tasks."""

    fleet: KnativeFleet
    deletion_costs: DeletionCosts
    cluster: LazyCluster
    agents: AgentAddresses
    handover: HandoverLoop | None


def cluster_parts(settings: ClusterSettings, context: FleetContext) -> ClusterParts:
    """Create the parts."""
    table = context.table

    def revision_name_of(target: CallTarget) -> NamespacedName:
        namespace = names.tenant_namespace(
            settings, table.tenant_name(target.tenant), target.environment
        )
        return namespace, names.revision_name(
            names.service_name(target.app, target.function), target.revision
        )

    cluster = LazyCluster(settings)
    pods = PodWatcher(selector=names.function_selector(settings))
    handover: HandoverLoop | None = None

    def wanted_of(key: str) -> int:
        bridged = handover.requested(key) if handover is not None else 0
        return context.waiting_of(key) + bridged

    fleet = KnativeFleet(
        cluster=cluster,
        pods=pods,
        claims=_claims(context),
        scale_requester=_scale_requester(
            settings, context, revision_name_of=revision_name_of, waiting_of=wanted_of
        ),
        targets=PodTargets(
            target_of=lambda pod: _target_of(table, pod),
            revision_name_of=revision_name_of,
            gpus=NodeGpus(settings),
            port=PROXY_PORT if settings.uses_kpa else WORKER_PORT,
        ),
        member=context.member,
        grace_s=settings.unschedulable_grace_s,
        promotions=_promotions(settings, context),
    )
    if settings.warm_pods:
        handover = HandoverLoop(
            fleet.scale_requester,
            context.revisions,
            promoted=fleet.claimed.promoted,
            free_own_pods=fleet.claimer.free_own_pods,
            handover_s=settings.handover_s,
        )
    deletion_costs = DeletionCosts(pods, cluster, load_of=partial(_loads, fleet, context))
    fleet.on_released = deletion_costs.on_released
    return ClusterParts(
        fleet=fleet,
        deletion_costs=deletion_costs,
        cluster=cluster,
        agents=AgentAddresses(settings.namespace),
        handover=handover,
    )


def _scale_requester(
    settings: ClusterSettings,
    context: FleetContext,
    *,
    revision_name_of: Callable[[CallTarget], NamespacedName],
    waiting_of: Callable[[str], int],
) -> ScaleRequester:
    """How pods are requested: of Knative's autoscaler, or of ours."""
    if context.demand is not None:
        return ReportedDemand(context.demand)
    return ActivationRequests(
        settings.wake_url, revision_name_of=revision_name_of, waiting_of=waiting_of
    )


def _loads(fleet: KnativeFleet, context: FleetContext) -> Mapping[str, tuple[str, int]]:
    """By pod: the revision's key, and the calls in flight of its instances."""
    calls = context.in_flight()
    return {
        uid: (key, sum(calls.get(instance, 0) for instance in instances))
        for uid, (instances, key) in fleet.claimed.by_uid().items()
    }


def _promotions(settings: ClusterSettings, context: FleetContext) -> Promotions | None:
    if not settings.warm_pods:
        return None

    def has_calls(key: str) -> bool:
        throttler = context.revisions().active(key)
        return throttler is not None and throttler.waiting > 0

    return Promotions(
        source=WarmPods(context.controller, token=context.token, member=context.member),
        has_calls=has_calls,
        patience_s=max(settings.handover_s, PATIENCE_S),
        forks=PodForks(
            shapes=settings.warm_pods,
            idle_templates=settings.idle_templates,
            idle_s=settings.idle_template_s,
        ),
    )


def _claims(context: FleetContext) -> PodLeaseStore:
    if context.redis_url is None:
        return InMemoryPodLeases(member=context.member)
    from activator.knative.leases.redis_pod_leases import RedisPodLeases

    return RedisPodLeases(context.redis_url, platform=context.platform, member=context.member)


def _target_of(table: RouteTable, pod: Pod) -> CallTarget | None:
    return table.target_keyed(pod.labels.get(names.TENANT, ""), pod.key)
