"""Brings a revision's own pods in for promoted ones: looks each second at the revisions that this
activator serves from promoted pods, and does what `handover.decide` says.

Own pods are requested as for calls that wait (`scale_request`), so that either autoscaler makes
them: Knative's counts a held request for each call in a promoted pod, ours the reported demand."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Protocol

from activator.balancing.throttler import Throttler
from activator.knative.leases.pod_leases import ClaimsUnreachable
from activator.knative.pod_registry import OwnedPod
from activator.knative.scale_request import ScaleRequester
from activator.knative.warm.handover import BridgeLoad, BridgeObservation, decide

log = logging.getLogger(__name__)

LOOK_S = 1.0


class CalledRevisions(Protocol):
    """The part of `activator.autoscaler.autoscaler_loop.AutoscalerLoop` that is used here."""

    def active(self, key: str) -> Throttler | None:
        """The throttler of a called revision, by its key; None otherwise."""

    def concurrency(self) -> Mapping[str, float]:
        """Average concurrent calls in the last second, by revision key."""

    def wanted(self, key: str) -> int:
        """Instances of a revision that the signals of the last decision call for."""


@dataclass(slots=True)
class _Bridge:
    load: BridgeLoad
    requests: AsyncExitStack = field(default_factory=AsyncExitStack)
    asks: int = 0
    calls: int = 0


class HandoverLoop:
    """The loop of one activator. Owner: the event loop."""

    def __init__(
        self,
        scale_requester: ScaleRequester,
        revisions: Callable[[], CalledRevisions],
        *,
        promoted: Callable[[], Mapping[str, Sequence[OwnedPod]]],
        free_own_pods: Callable[[str], Awaitable[int]],
        handover_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`promoted`: the promoted pods that this activator has claimed, by revision key.
        `free_own_pods`: the number of a revision's own pods that answer, and that no activator has
        claimed; raises ClaimsUnreachable. `handover_s`: how long load must last until own pods are
        requested."""
        self._scale_requester = scale_requester
        self._promoted = promoted
        self._free_own_pods = free_own_pods
        self._revisions = revisions
        self._handover_s = handover_s
        self._clock = clock
        self._bridges: dict[str, _Bridge] = {}

    def __repr__(self) -> str:
        asking = sum(bridge.asks for bridge in self._bridges.values())
        return f"<HandoverLoop {len(self._bridges)} revisions bridged, {asking} own pods requested>"

    def requested(self, key: str) -> int:
        """Number of calls in promoted pods that own pods are requested for."""
        bridge = self._bridges.get(key)
        return max(bridge.asks, bridge.calls) if bridge is not None and bridge.asks else 0

    async def run(self) -> None:
        """Look each second, until cancelled."""
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                await self.poll_once()
        finally:
            for key in list(self._bridges):
                await self._end(key)

    async def poll_once(self) -> None:
        """Look at all revisions once."""
        found, revisions = self._promoted(), self._revisions()
        loads = revisions.concurrency() if found else {}
        for key in self._bridges.keys() - found.keys():
            await self._end(key)
        for key, pods in found.items():
            throttler = revisions.active(key)
            if throttler is None or throttler.is_retired:
                await self._end(key)
                continue
            try:
                await self._check(key, throttler, pods, loads.get(key, 0.0))
            except ClaimsUnreachable as e:
                log.info("no hand-over now revision=%s error=%s", key, e)

    async def _end(self, key: str) -> None:
        bridge = self._bridges.pop(key, None)
        if bridge is not None:
            await bridge.requests.aclose()

    async def _check(
        self, key: str, throttler: Throttler, pods: Sequence[OwnedPod], concurrency: float
    ) -> None:
        now = self._clock()
        bridge = self._bridges.get(key)
        if bridge is None:
            bridge = self._bridges[key] = _Bridge(
                BridgeLoad(since=now, window=math.ceil(self._handover_s / LOOK_S))
            )
        ids = {str(instance) for held in pods for instance in held.ports}
        live = list(throttler.live())
        promoted = [one for one in live if one.id in ids]
        bridge.calls = sum(one.in_flight for one in promoted)
        share = concurrency / max(1, len(promoted))
        bridge.load.record(1.0 if throttler.waiting else min(1.0, share))
        lasts = bridge.load.lasts(now)
        own = len(live) - len(promoted)
        seen = BridgeObservation(
            promoted=len(promoted),
            idle=sum(not one.in_flight for one in promoted),
            own=own,
            own_free=await self._free_own_pods(key) if lasts or own else 0,
            starting=throttler.starting,
            needed=self._needed(key, throttler),
            room=throttler.target.spec.scaling.max_instances
            - len(throttler.instances)
            - throttler.starting,
        )
        step = decide(seen, lasts=lasts)
        await self._request(bridge, throttler, step.asks)
        if step.starts:
            throttler.start(step.starts)
        for instance in sorted(promoted, key=lambda one: one.in_flight)[: step.drains]:
            throttler.drain(instance)

    def _needed(self, key: str, throttler: Throttler) -> int:
        calls = throttler.in_flight + throttler.waiting
        return max(self._revisions().wanted(key), math.ceil(calls / throttler.slots_each))

    async def _request(self, bridge: _Bridge, throttler: Throttler, asks: int) -> None:
        if asks == bridge.asks:
            return
        log.info("own pods requested target=%r pods=%d", throttler.target, asks)
        await bridge.requests.aclose()
        bridge.requests, bridge.asks = AsyncExitStack(), asks
        for _ in range(asks):
            await bridge.requests.enter_async_context(
                self._scale_requester.requested(throttler.target)
            )
