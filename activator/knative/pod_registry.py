"""Records of the pods that a fleet has claimed, and of the starts that wait for one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from activator.knative.pod_watcher import Pod
from snapshotter.types import InstanceId


@dataclass(slots=True)
class OwnedPod:
    """A pod that this activator has claimed. `is_told`: its end was reported; `is_lost`: another
    activator has it."""

    pod: Pod
    instance: InstanceId
    is_told: bool = False
    is_lost: bool = False


@dataclass(slots=True)
class PendingStart:
    """The waiting starts of one revision. They claim pods one after the other."""

    starts: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
