"""The pods that a fleet has claimed, the instances in them, and the claims in the store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from activator.knative.activation_requests import RevisionNameOf
from activator.knative.leases.pod_leases import ClaimsUnreachable, PodLeaseStore
from activator.knative.node_gpus import NodeGpus
from activator.knative.pod_watcher import Pod, PodWatcher
from activator.knative.readiness_probe import WORKER_PORT
from activator.routing.route_table import CallTarget
from snapshotter import errors
from snapshotter.types import InstanceId

log = logging.getLogger(__name__)

BEAT_S = 1.0
"""Interval between statements of our claims; a fifteenth of a membership."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodTargets:
    """Which target a pod belongs to (None: it has no route), where a target's pods are made, which
    GPUs a pod has, and to which port calls go."""

    target_of: Callable[[Pod], CallTarget | None]
    revision_name_of: RevisionNameOf
    gpus: NodeGpus
    port: int

    def port_of(self, pod: Pod) -> int:
        """Where the calls of a pod go. A promoted pod has no queue-proxy, whatever scales it."""
        return WORKER_PORT if pod.is_promoted else self.port


@dataclass(slots=True)
class OwnedPod:
    """A pod that this activator has claimed.

    Attributes:
        instance: the id of its first instance, under which the pod was claimed.
        ports: the port of each instance in it; its first one is at the worker's.
        has_template: whether its launcher has said that it can fork its instances.
        forking: number of forks whose ports are not known yet.
        idle_since: monotonic time since which a promoted pod has no instance, but its Template.
        is_told: its end was reported. is_lost: another activator has it."""

    pod: Pod
    instance: InstanceId
    ports: dict[InstanceId, int] = field(default_factory=dict)
    has_template: bool = False
    forking: int = 0
    idle_since: float | None = None
    is_told: bool = False
    is_lost: bool = False


class PodRegistry:
    """The claimed pods, by life and by instance. Owner: the event loop."""

    def __init__(self) -> None:
        self._pods: dict[str, OwnedPod] = {}
        self._lives: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<PodRegistry {len(self._pods)} pods>"

    def __len__(self) -> int:
        return len(self._pods)

    def __iter__(self) -> Iterator[OwnedPod]:
        return iter(list(self._pods.values()))

    def __contains__(self, pod: Pod) -> bool:
        return pod.life in self._pods

    def get(self, life: str) -> OwnedPod | None:
        """The pod in that life; None when it is not claimed here."""
        return self._pods.get(life)

    def of_instance(self, instance: str) -> OwnedPod | None:
        """The pod of an instance."""
        life = self._lives.get(instance)
        return self._pods.get(life) if life is not None else None

    def of_revision(self, key: str) -> list[OwnedPod]:
        """The pods of a revision."""
        return [held for held in self._pods.values() if held.pod.key == key]

    def by_uid(self) -> dict[str, tuple[tuple[InstanceId, ...], str]]:
        """Instances and revision key of each pod, by its uid."""
        return {held.pod.uid: (tuple(held.ports), held.pod.key) for held in self}

    def promoted(self) -> dict[str, list[OwnedPod]]:
        """The promoted pods, by revision key."""
        found: dict[str, list[OwnedPod]] = {}
        for held in self:
            if held.pod.is_promoted:
                found.setdefault(held.pod.key, []).append(held)
        return found

    def add(self, held: OwnedPod) -> None:
        """Add a pod with its instances."""
        self._pods[held.pod.life] = held
        for instance in held.ports:
            self._lives[instance] = held.pod.life

    def add_instance(self, held: OwnedPod, instance: InstanceId) -> None:
        """Add a further instance of a pod."""
        self._lives[instance] = held.pod.life

    def forget_instance(self, instance: str) -> None:
        """Forget an instance that has ended."""
        self._lives.pop(instance, None)

    def remove(self, life: str) -> OwnedPod | None:
        """Remove a pod and its instances; None when it is not there."""
        held = self._pods.pop(life, None)
        if held is not None:
            for instance in held.ports:
                self._lives.pop(instance, None)
        return held


class PodClaims:
    """The claims of this activator on pods, in the store of all activators. Owner: the event loop.

    Attributes:
        restored: set once the claims of this activator from before its restart are known."""

    def __init__(
        self,
        store: PodLeaseStore,
        pods: PodWatcher,
        claimed: PodRegistry,
        *,
        on_lost: Callable[[OwnedPod], None],
    ) -> None:
        """`on_lost`: called with each pod that another activator has claimed, unless its end was
        reported before."""
        self._store = store
        self._on_lost = on_lost
        self._pods = pods
        self.claimed = claimed
        self._lives: set[str] = set()
        self._is_reachable = True
        self.restored = asyncio.Event()

    def __repr__(self) -> str:
        return f"<PodClaims on {len(self._lives)} lives>"

    def add(self, held: OwnedPod) -> None:
        """Register a claimed pod."""
        self.claimed.add(held)
        self._lives.add(held.pod.life)

    def had(self, life: str) -> bool:
        """Whether it was claimed here at any time."""
        return life in self._lives

    def on_life_ended(self, pod: Pod) -> None:
        """Handle the end of a pod's life."""
        self._lives.discard(pod.life)

    async def claim(
        self, revision: str, instance: str, lives: Sequence[str], *, pods: int
    ) -> str | None:
        """Claim the first free one of `lives`, as `PodLeaseStore.claim`."""
        try:
            life = await self._store.claim(revision, instance, lives, pods=pods)
        except ClaimsUnreachable as e:
            self._on_unreachable(e)
            raise
        self._is_reachable = True
        return life

    async def free(self, revision: str, lives: Sequence[str]) -> int:
        """How many of `lives` no activator has claimed. Raises ClaimsUnreachable."""
        return len(await self._store.free(revision, lives)) if lives else 0

    async def release(self, life: str) -> None:
        """Release a claim, as `PodLeaseStore.release`."""
        await self._store.release(life)

    async def run(self) -> None:
        """State our claims periodically, until cancelled."""
        while True:
            await asyncio.sleep(BEAT_S)
            await self.state()

    async def state(self) -> None:
        """State our claims once. Pods that others claimed meanwhile get no more calls here. Does
        nothing before our claims are restored: that would release them."""
        if not self.restored.is_set():
            return
        try:
            lost = await self._store.state()
        except ClaimsUnreachable as e:
            self._on_unreachable(e)
            return
        self._is_reachable = True
        for life in lost:
            held = self.claimed.get(life)
            if held is None:
                continue
            held.is_lost = True
            if not held.is_told:
                held.is_told = True
                log.warning(
                    "another activator claimed our pod instance=%s pod=%s",
                    held.instance,
                    held.pod.name,
                )
                self._on_lost(held)

    def _on_unreachable(self, error: ClaimsUnreachable) -> None:
        if self._is_reachable:
            log.warning("pods cannot be claimed; claimed pods continue to serve error=%s", error)
        self._is_reachable = False

    async def restore(
        self, *, port_of: Callable[[Pod], int], adopt: Callable[[OwnedPod], Awaitable[None]]
    ) -> None:
        """Restore the claims of this activator from before its restart. `adopt`: finds the further
        instances of a pod. Raises AgentUnavailable."""
        try:
            claims = await self._store.mine()
        except ClaimsUnreachable as e:
            raise errors.AgentUnavailable(str(e)) from e
        self.restored.set()
        for claim in claims:
            if self.claimed.get(claim.life) is not None:
                continue  # already claimed by a start
            pod = self._pods.alive(claim.life)
            if pod is None or not pod.is_usable:
                await self._store.release(claim.life)
            else:
                instance = InstanceId(claim.instance)
                held = OwnedPod(pod, instance, {instance: port_of(pod)})
                self.add(held)
                await adopt(held)
                self.claimed.add(held)  # with all its instances
