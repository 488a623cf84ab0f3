"""What environment snapshots may cost: builds per hour, memory while one is built, and how many
there are."""

from __future__ import annotations

from collections.abc import Callable

from snapshotter.slots.instances import Instances
from snapshotter.snapshots.background_builder import BackgroundBuilder
from snapshotter.starts.node_capacity import NodeCapacity
from snapshotter.starts.templates import Templates

DELAY_S = 2.0
"""The first calls of the new instance have the processor to themselves."""
_MEMORY_BYTES = 1024**3
"""Memory that must be free: torch and transformers take some 600 MB."""


class ImportBudget:
    """The budget. Owner: the event loop.

    Attributes:
        snapshots: most environment snapshots of the node.
        delay_s: pause between a boot and what it causes.
    """

    def __init__(
        self,
        *,
        snapshots: int,
        delay_s: float,
        builder: BackgroundBuilder,
        room: NodeCapacity,
        instances: Instances,
        templates: Templates,
    ) -> None:
        self.snapshots = snapshots
        self.delay_s = delay_s
        self._spend: Callable[[], bool] = builder.spend
        self._room = room
        self._instances = instances
        self._templates = templates

    def spend(self) -> bool:
        """Take one build; False if it is not allowed now: the next boot asks again."""
        used = self._instances.claimed_bytes() + self._templates.pss_bytes()
        return used + _MEMORY_BYTES <= self._room.memory_bytes and self._spend()
