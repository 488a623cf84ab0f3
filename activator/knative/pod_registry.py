"""What a fleet of pods keeps of each pod that is its own, and of the starts that wait for one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from activator.knative.pods import Pod
from snapshotter.types import InstanceId


@dataclass(slots=True)
class OwnedPod:
    """A pod of ours. `is_told`: that it ends was said; `is_lost`: another activator has it."""

    pod: Pod
    instance: InstanceId
    is_told: bool = False
    is_lost: bool = False


@dataclass(slots=True)
class PendingStart:
    """Starts of one revision; they look for pods one after the other."""

    starts: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
