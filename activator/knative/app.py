"""Creates the parts of a fleet of pods, in dependency order. Nothing runs yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from activator.knative.activation_requests import ActivationRequests, Place
from activator.knative.agent_addresses import AgentAddresses
from activator.knative.deletion_cost import DeletionCosts
from activator.knative.fleet import KnativeFleet, PodTargets
from activator.knative.lazy_client import LazyCluster
from activator.knative.node_gpus import NodeGpus
from activator.knative.pod_leases import InMemoryPodLeases, PodLeaseStore
from activator.knative.pod_watcher import Pod, PodWatcher
from activator.knative.readiness_probe import PROXY_PORT, WORKER_PORT
from activator.knative.scale_request import ReportedDemand, ScaleDemand, ScaleRequester
from activator.routing.route_table import CallTarget, RouteTable
from pilotlight.kubernetes import names
from pilotlight.kubernetes.settings import ClusterSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetContext:
    """What a fleet needs of its activator.

    Attributes:
        redis_url: where claims are shared; None = this is the only activator.
        platform: its name in that Redis.
        demand: with our own autoscaler: receives the number of desired pods.
        waiting_of: number of calls of a revision (by key) that wait for an instance here.
        in_flight: number of calls in each of our instances, by its id."""

    member: str
    table: RouteTable
    redis_url: str | None
    platform: str
    demand: ScaleDemand | None
    waiting_of: Callable[[str], int]
    in_flight: Callable[[], Mapping[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterParts:
    """A fleet and its companion tasks."""

    fleet: KnativeFleet
    costs: DeletionCosts
    cluster: LazyCluster
    agents: AgentAddresses


def cluster_parts(settings: ClusterSettings, around: FleetContext) -> ClusterParts:
    """Create the parts. Raises ValueError where our own autoscaler is configured and there is no
    demand."""
    table = around.table

    def whereabouts(target: CallTarget) -> Place:
        namespace = names.tenant_namespace(
            settings, table.tenant_name(target.tenant), target.environment
        )
        return namespace, names.revision_name(
            names.service_name(target.app, target.function), target.revision
        )

    cluster = LazyCluster(settings)
    pods = PodWatcher(selector=names.function_selector(settings))
    is_kpa = settings.autoscaler == "kpa"
    summons: ScaleRequester
    if is_kpa:
        summons = ActivationRequests(
            settings.wake_url, whereabouts=whereabouts, waiting_of=around.waiting_of
        )
    elif around.demand is not None:
        summons = ReportedDemand(around.demand)
    else:
        raise ValueError(
            "cluster.autoscaler = 'pilotlight': needs activator.redis_url, through which "
            "activators report their demand"
        )
    fleet = KnativeFleet(
        cluster=cluster,
        pods=pods,
        claims=_claims(around),
        summons=summons,
        targets=PodTargets(
            target_of=lambda pod: _target_of(table, pod),
            whereabouts=whereabouts,
            gpus=NodeGpus(settings),
        ),
        member=around.member,
        port=PROXY_PORT if is_kpa else WORKER_PORT,
        grace_s=settings.unschedulable_grace_s,
    )

    def loads() -> Mapping[str, tuple[str, int]]:
        calls = around.in_flight()
        return {uid: (key, calls.get(instance, 0)) for uid, (instance, key) in fleet.held().items()}

    costs = DeletionCosts(pods, cluster, load_of=loads)
    fleet.on_released = costs.on_released
    return ClusterParts(
        fleet=fleet, costs=costs, cluster=cluster, agents=AgentAddresses(settings.namespace)
    )


def _claims(around: FleetContext) -> PodLeaseStore:
    if around.redis_url is None:
        return InMemoryPodLeases(member=around.member)
    from activator.knative.redis_pod_leases import RedisPodLeases

    return RedisPodLeases(around.redis_url, platform=around.platform, member=around.member)


def _target_of(table: RouteTable, pod: Pod) -> CallTarget | None:
    return table.target_keyed(pod.labels.get(names.TENANT, ""), pod.key)
