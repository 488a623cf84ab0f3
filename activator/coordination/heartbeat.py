"""The loop that keeps a member alive: beat, make room for others, end what the dead left behind.

An instance is leased to one activator. When that one has lapsed and its process is really gone (its
socket refuses), its instances would run on with nobody to call them, so whoever sees it first stops
them. An activator that is restarted in time finds its own again."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from activator.autoscaler.loop import ORPHAN_GRACE_S, AutoscalerLoop
from activator.coordination.state import BEAT_S, TTL_S, HeartbeatReply
from snapshotter import errors as agent_errors
from snapshotter.types import InstanceId, InstanceInfo

log = logging.getLogger(__name__)

START_GRACE_S = 2 * TTL_S
"""After our own start the others may not have joined yet: nothing is taken for left behind before
this."""


class HeartbeatStore(Protocol):
    """The part of the shared state that the loop needs."""

    member: str

    async def beat(self) -> HeartbeatReply | None:
        """See SharedState."""
        ...

    async def wait_news(self, timeout_s: float) -> None:
        """Returns when there is something to tell, at the latest after `timeout_s`."""
        ...


class Leases(Protocol):
    """The node's instances, whoever leases them."""

    async def leased(self) -> list[InstanceInfo]:
        """All live instances."""
        ...

    async def stop(self, instance_id: InstanceId, *, grace_s: float) -> None:
        """Drain and end one."""
        ...


class HeartbeatLoop:
    """See the module. Owner: the event loop."""

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
        self._look_at = clock() + START_GRACE_S

    async def run(self) -> None:
        """Forever. The first beat waits until the instances that are ours were adopted, because it
        states what we hold."""
        await self._scaler.reconciled.wait()
        while True:
            pulse = await self._state.beat()
            if pulse is not None:
                self._scaler.make_room(pulse)
                if self._clock() >= self._look_at:
                    self._look_at = self._clock() + TTL_S / 3
                    await self.free_abandoned(pulse.members)
            await self._state.wait_news(BEAT_S)

    async def free_abandoned(self, members: frozenset[str]) -> None:
        """Stop the instances of activators that are neither members nor processes any more."""
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
                        "instance of an activator that is gone is stopped instance=%s lessee=%s",
                        info.id,
                        info.lessee,
                    )
                    await self._leases.stop(info.id, grace_s=ORPHAN_GRACE_S)
        except agent_errors.SnapshotterError as e:
            log.warning("instances left behind were not looked for error=%s", e)
