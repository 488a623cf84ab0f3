"""The heartbeat loop: renew the membership, make room for other members, and stop the instances of
dead ones.

An instance is leased to one activator. When that activator's membership has lapsed and its process
has ended (its socket refuses connections), its instances would keep running without calls, so the
first activator that detects it stops them. An activator that restarts in time adopts its instances
again."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from activator.autoscaler.autoscaler_loop import AutoscalerLoop
from activator.autoscaler.instance_reconciler import ORPHAN_GRACE_S
from activator.coordination.state import BEAT_S, TTL_S, HeartbeatReply
from snapshotter import errors as agent_errors
from snapshotter.types import InstanceId, InstanceInfo

log = logging.getLogger(__name__)

START_GRACE_S = 2 * TTL_S
"""Time after our own start before instances count as abandoned: the other members may not have
joined yet."""


class HeartbeatStore(Protocol):
    """The part of the shared state that the heartbeat loop uses."""

    member: str

    async def beat(self) -> HeartbeatReply | None:
        """State the holdings and renew the membership; None when the store does not answer."""

    async def wait_for_changes(self, timeout_s: float) -> None:
        """Return when the holdings have changed, at the latest after `timeout_s`."""


class Leases(Protocol):
    """The node's instances, of all lessees."""

    async def leased(self) -> list[InstanceInfo]:
        """Return all live instances."""

    async def stop(self, instance_id: InstanceId, *, grace_s: float) -> None:
        """Drain and stop one instance."""


class HeartbeatLoop:
    """Sends heartbeats and stops abandoned instances. Owner: the event loop."""

    def __init__(
        self,
        state: HeartbeatStore,
        *,
        scaler: AutoscalerLoop,
        leases: Leases,
        is_process_alive: Callable[[str], Awaitable[bool]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._scaler = scaler
        self._leases = leases
        self._is_process_alive = is_process_alive
        self._clock = clock
        self._check_at = clock() + START_GRACE_S

    async def run(self) -> None:
        """Run forever. The first heartbeat waits until our instances are adopted, because it states
        what we hold."""
        await self._scaler.reconciled.wait()
        while True:
            reply = await self._state.beat()
            if reply is not None:
                self._scaler.make_room(reply)
                if self._clock() >= self._check_at:
                    self._check_at = self._clock() + TTL_S / 3
                    await self.free_abandoned(reply.members)
            await self._state.wait_for_changes(BEAT_S)

    async def free_abandoned(self, members: frozenset[str]) -> None:
        """Stop the instances of activators whose membership and process have both ended."""
        try:
            abandoned = [
                info
                for info in await self._leases.leased()
                if info.lessee is not None and info.lessee not in members
            ]
            for info in abandoned:
                if (
                    info.lessee is not None
                    and info.lessee != self._state.member
                    and not await self._is_process_alive(info.lessee)
                ):
                    log.warning(
                        "stopping instance of a dead activator instance=%s lessee=%s",
                        info.id,
                        info.lessee,
                    )
                    await self._leases.stop(info.id, grace_s=ORPHAN_GRACE_S)
        except agent_errors.SnapshotterError as e:
            log.warning("cannot list abandoned instances error=%s", e)
