"""An instance's process in a slot as the agent knows it, and its exit status."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from snapshotter.types import InstanceId


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
