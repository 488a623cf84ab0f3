"""Claims for a start the first ready pod of its revision that no activator has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from activator.knative.leases.pod_leases import ClaimsUnreachable
from activator.knative.pod_deletion import PodDeletion
from activator.knative.pod_registry import OwnedPod, PodClaims, PodTargets
from activator.knative.pod_watcher import Pod, PodWatcher
from activator.knative.readiness_probe import ReadinessListener, ReadinessProbe
from activator.knative.warm.waiting_starts import WaitingStart, WaitingStarts
from activator.routing.route_table import CallTarget
from snapshotter.types import StartKind

FIRST_ANSWER_S = 0.25
"""How long the worker of a pod that Kubernetes reports ready may take to answer, before another pod
is requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodClaim:
    """A pod that was claimed for a start: how its worker started, and how long what took, in ms."""

    pod: Pod
    start_kind: StartKind = StartKind.WARM
    phases_ms: Mapping[str, float] = field(default_factory=dict)


class PodClaimer:
    """Claims pods that are there. Owner: the event loop."""

    def __init__(
        self,
        pods: PodWatcher,
        claims: PodClaims,
        readiness: ReadinessProbe,
        starts: WaitingStarts,
        *,
        targets: PodTargets,
        deletion: PodDeletion,
    ) -> None:
        self._pods = pods
        self._claims = claims
        self._readiness = readiness
        self._starts = starts
        self._targets = targets
        self._deletion = deletion

    def __repr__(self) -> str:
        return f"<PodClaimer of {self._pods!r}>"

    async def claim_existing(
        self, target: CallTarget, start: WaitingStart, others: set[str]
    ) -> PodClaim | None:
        """Claim an existing pod. A pod that Kubernetes reports ready, but that was not probed yet,
        gets a moment to answer."""
        changed = self._pods.changed(target.key)
        found = await self.claim(target, start, others)
        unasked = [
            pod
            for pod in self._pods.of(target.key)
            if pod.is_ready and pod.is_usable and self._readiness.of(pod.life) is None
            if pod not in self._claims.claimed
        ]
        if found is not None or not unasked:
            return found
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_ANSWER_S):
                await changed.wait()
        return await self.claim(target, start, others)

    async def claim(
        self, target: CallTarget, start: WaitingStart, others: set[str]
    ) -> PodClaim | None:
        """Claim a pod that is ready and unclaimed. Adds the lives that others have claimed to
        `others`."""
        async with self._starts.claiming(target.key):
            pods = self._pods.of(target.key)
            candidates = {
                pod.life: pod
                for pod in pods
                if pod.is_usable
                and pod not in self._claims.claimed
                and not self._deletion.is_replaced(pod)
                and self._targets.gpus.is_known(target, pod)
            }
            ready = self._ready(candidates)
            ready.sort(key=lambda life: candidates[life].is_promoted)
            if not ready:
                return None
            asked_at = time.monotonic()
            try:
                life = await self._claims.claim(
                    target.key, start.instance, ready, pods=sum(pod.is_coming for pod in pods)
                )
            except ClaimsUnreachable:
                return None
            if life is None:
                others |= set(ready)
                for other in ready:
                    self._starts.on_claimed(candidates[other])
                return None
            found = self._pods.alive(life)
            if found is None or not found.is_usable:  # it ended during the claim
                await self._claims.release(life)
                return None
            return self._register(target, found, start, asked_at, was_others=life in others)

    async def free_own_pods(self, key: str) -> int:
        """Number of pods of the revision's own that answer, and that no activator has claimed.
        Raises ClaimsUnreachable."""
        own = {
            pod.life: pod
            for pod in self._pods.of(key)
            if pod.is_usable and not pod.is_promoted and pod not in self._claims.claimed
        }
        return await self._claims.free(key, self._ready(own))

    def _ready(self, candidates: Mapping[str, Pod]) -> list[str]:
        """The lives of the pods that answer; the others are probed."""
        for pod in candidates.values():
            self._readiness.probe(pod)
        return [life for life in candidates if self._readiness.of(life) is not None]

    def _register(
        self,
        target: CallTarget,
        pod: Pod,
        start: WaitingStart,
        asked_at: float,
        *,
        was_others: bool,
    ) -> PodClaim:
        ports = {start.instance: self._targets.port_of(pod)}
        self._claims.add(OwnedPod(pod, start.instance, ports))
        self._pods.notify(target.key)  # the other starts may fork in it
        took_ms = self._starts.on_claimed(pod)
        now = time.monotonic()
        ready = self._readiness.of(pod.life) or ReadinessListener(start_kind=StartKind.COLD)
        is_fresh = not was_others and (
            pod.seen_at >= start.began or (ready.asks > 1 and ready.at >= start.began)
        )
        claim_ms = {"claim": (now - asked_at) * 1000}
        if not is_fresh:
            return PodClaim(pod=pod, phases_ms=claim_ms)
        warm_ms = {"warm": took_ms} if took_ms is not None else {}
        known_ms = sum((*ready.phases_ms.values(), *warm_ms.values(), *claim_ms.values()))
        pod_ms = max(0.0, (now - start.began) * 1000 - known_ms)
        phases_ms = {**warm_ms, "pod": pod_ms, **ready.phases_ms, **claim_ms}
        return PodClaim(pod=pod, start_kind=ready.start_kind, phases_ms=phases_ms)
