"""An instance's process in a slot as the agent knows it, its exit status, and the listener of a
slot."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from snapshotter.types import InstanceId

if TYPE_CHECKING:
    from snapshotter.slots.slot import Slot


@dataclass(frozen=True, kw_only=True)
class ExitStatus:
    """How a process exited: wait status, or None if unknown. `lost`: it was never forked, because
    its Template had exited."""

    status: int | None
    lost: bool = False


@dataclass(kw_only=True, eq=False)
class InstanceProcess:
    """An instance in a slot. Owner: the event loop; changed only by Slot's event handlers.

    Attributes:
        ready: phases (ms) once it serves; cancelled if the process exits first.
        exited: how the process exited.
        error: what user code raised during the start.
    """

    id: InstanceId
    note: Mapping[str, Any]
    ready: asyncio.Future[Mapping[str, float]]
    exited: asyncio.Future[ExitStatus]
    pidfd: int = -1
    pid: int = 0
    error: Mapping[str, Any] | None = None


class SlotListener(Protocol):
    """Receives the events of a slot."""

    def on_instance_exit(self, slot: Slot, running: InstanceProcess) -> None: ...

    def on_worker_exit(self, slot: Slot, status: int | None) -> None: ...

    def on_slot_lost(self, slot: Slot) -> None: ...

    def log_dropped(self, count: int) -> None: ...

    def on_parked(self, slot: Slot) -> None: ...

    def on_parked_exit(self, slot: Slot, name: str) -> None: ...
