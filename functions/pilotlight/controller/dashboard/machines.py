"""What runs now, asked of the node agent and cut to whoever may see it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pilotlight.controller.dashboard.visit import Visit, or_trouble
from snapshotter.errors import SnapshotterError
from snapshotter.types import InstanceInfo

MOST_MEASURED = 32
"""Instances whose memory one page asks for."""
PATIENCE_S = 0.25
"""A page does not wait longer for what it can do without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Instances, and why there are none to see where the agent does not answer."""

    instances: Sequence[InstanceInfo]
    trouble: str = ""


async def running(visit: Visit, *, function: tuple[str, str] | None = None) -> Running:
    """Instances of the environment, or of one of its functions; none for a key that only reads
    bills."""
    if not visit.sees_instances:
        return Running(instances=())
    labels = {"tenant": visit.caller.tenant, "environment": visit.environment}
    if function is not None:
        labels |= {"app": function[0], "function": function[1]}
    instances, trouble = await or_trouble(visit.context.agent.instances(labels), [])
    return Running(instances=instances, trouble=trouble)


async def measured(visit: Visit, instances: Sequence[InstanceInfo]) -> dict[str, int]:
    """The most memory (bytes) that an instance of each function id has now, of those that tell in
    time."""
    asked = instances[:MOST_MEASURED]
    answers = await asyncio.gather(*(_memory(visit, instance) for instance in asked))
    most: dict[str, int] = {}
    for instance, memory in zip(asked, answers, strict=True):
        identity = str(instance.revision).partition("@")[0]
        if memory:
            most[identity] = max(memory, most.get(identity, 0))
    return most


async def _memory(visit: Visit, instance: InstanceInfo) -> int:
    try:
        async with asyncio.timeout(PATIENCE_S):
            told: Mapping[str, object] = await visit.context.agent.usage(instance.id)
    except (SnapshotterError, TimeoutError):
        return 0  # it is gone, or busy: a hint less
    memory = told.get("memory_bytes")
    return memory if isinstance(memory, int) else 0
