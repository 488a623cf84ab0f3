"""An instance in a slot as the agent sees it, how it ends, and who is told."""

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
    """How a process ended: wait status, None when nobody could tell. `lost`: it never came to be,
    its Template was gone."""

    status: int | None
    lost: bool = False


@dataclass(kw_only=True, eq=False)
class InstanceProcess:
    """An instance in a slot. Owner: the event loop; changed by Slot's event handlers only.

    Attributes:
        ready: phases (ms) once it serves; cancelled when it is gone first.
        gone: how it ended.
        error: what user code raised while it started.
    """

    id: InstanceId
    note: Mapping[str, Any]
    ready: asyncio.Future[Mapping[str, float]]
    gone: asyncio.Future[ExitStatus]
    pidfd: int = -1
    pid: int = 0
    error: Mapping[str, Any] | None = None


class SlotListener(Protocol):
    """Who is told what happens in a slot without being asked."""

    def instance_gone(self, slot: Slot, running: InstanceProcess) -> None: ...

    def worker_gone(self, slot: Slot, status: int | None) -> None: ...

    def slot_gone(self, slot: Slot) -> None: ...

    def log_dropped(self, count: int) -> None: ...

    def parked(self, slot: Slot) -> None: ...

    def parked_gone(self, slot: Slot, name: str) -> None: ...
