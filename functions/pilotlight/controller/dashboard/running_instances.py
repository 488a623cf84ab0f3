"""Running instances, queried from the node agent and limited to what the key may see."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pilotlight.controller.analytics import gpu_use
from pilotlight.controller.analytics.gpu_use import GpuNow
from pilotlight.controller.dashboard.page_context import PageContext, or_error_banner
from snapshotter.errors import SnapshotterError
from snapshotter.types import InstanceInfo

MOST_MEASURED = 32
"""Instances whose memory one page queries at most."""
PATIENCE_S = 0.25
"""Timeout for optional values of a page, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningInstances:
    """Instances, or the reason why they are unknown if the agent does not respond."""

    instances: Sequence[InstanceInfo]
    trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveUse:
    """Instances now, the highest memory of one by function id, and the use of their GPUs."""

    running: RunningInstances
    memory: Mapping[str, int]
    gpus: Sequence[GpuNow]


async def live_use(visit: PageContext, *, function: tuple[str, str] | None = None) -> LiveUse:
    """Return what the environment, or one of its functions, uses now."""
    running = await list_running(visit, function=function)
    return LiveUse(
        running=running,
        memory=await peak_memory(visit, running.instances),
        gpus=await gpus_now(visit, function=function),
    )


async def list_running(
    visit: PageContext, *, function: tuple[str, str] | None = None
) -> RunningInstances:
    """Return the instances of the environment, or of one of its functions; none for a key with
    scope read-billing."""
    if not visit.sees_instances:
        return RunningInstances(instances=())
    labels = {"tenant": visit.caller.tenant, "environment": visit.environment}
    if function is not None:
        labels |= {"app": function[0], "function": function[1]}
    instances, trouble = await or_error_banner(visit.context.agent.instances(labels), [])
    return RunningInstances(instances=instances, trouble=trouble)


async def gpus_now(visit: PageContext, *, function: tuple[str, str] | None = None) -> list[GpuNow]:
    """Return the use of the GPUs of the environment, or of one of its functions; [] where the agent
    does not tell it in time, and for a key with scope read-billing.

    The reports of a cluster's nodes are not used: they say whose a GPU is as pods say it
    themselves, and a page must not show the use of another tenant's."""
    if not visit.sees_instances:
        return []
    own = {"tenant": visit.caller.tenant, "environment": visit.environment}
    if function is not None:
        own |= {"app": function[0], "function": function[1]}
    try:
        async with asyncio.timeout(PATIENCE_S):
            return gpu_use.of_agent(await visit.context.agent.gpus(), own)
    except (SnapshotterError, TimeoutError):
        return []


async def peak_memory(visit: PageContext, instances: Sequence[InstanceInfo]) -> dict[str, int]:
    """Return the highest memory (bytes) of an instance by function id, from those that respond in
    time."""
    sampled = instances[:MOST_MEASURED]
    memories = await asyncio.gather(*(_memory(visit, instance) for instance in sampled))
    most: dict[str, int] = {}
    for instance, memory in zip(sampled, memories, strict=True):
        identity = str(instance.revision).partition("@")[0]
        if memory:
            most[identity] = max(memory, most.get(identity, 0))
    return most


async def _memory(visit: PageContext, instance: InstanceInfo) -> int:
    try:
        async with asyncio.timeout(PATIENCE_S):
            usage: Mapping[str, object] = await visit.context.agent.usage(instance.id)
    except (SnapshotterError, TimeoutError):
        return 0  # stopped or busy: no memory hint
    memory = usage.get("memory_bytes")
    return memory if isinstance(memory, int) else 0
