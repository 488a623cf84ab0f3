"""A new agent takes over the slots of an earlier one: live slots are mirrored, everything else is
removed.

Only immutable facts are read from disk (`housing.json`); the shims report what runs and how it
exited.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable
from pathlib import Path

from snapshotter.linux.cgroups import Cgroups, Group
from snapshotter.slots.allocator import SlotAllocator
from snapshotter.slots.instance_process import InstanceProcess
from snapshotter.slots.instances import Instance, Instances
from snapshotter.slots.occupied_slot import OccupiedSlot
from snapshotter.slots.pool import SlotPool
from snapshotter.slots.replies import BootFailed, SlotConnectionLost
from snapshotter.slots.slot import Slot
from snapshotter.starts import frozen_workers
from snapshotter.starts.teardown import Teardown
from snapshotter.starts.template_boot import TemplateBooter
from snapshotter.types import InstanceInfo

_log = logging.getLogger(__name__)
_CANNOT_BE_TAKEN_OVER = (
    SlotConnectionLost,
    BootFailed,
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    asyncio.InvalidStateError,
)
"""Errors of a slot whose shim or files do not match this agent: from another version, or corrupt.
"""


async def reattach(
    *,
    slot_pool: SlotPool,
    slot_allocator: SlotAllocator,
    template_booter: TemplateBooter,
    ends: Teardown,
    instances: Instances,
) -> None:
    """Take over every live slot. Instances keep their InstanceInfo; those that were never handed
    out are killed.

    A slot that cannot be taken over is ended with everything in it; the others, and the agent,
    continue without it.
    """
    for slot in await slot_pool.adopt():
        try:
            await _adopt(
                slot,
                slot_allocator=slot_allocator,
                template_booter=template_booter,
                ends=ends,
                instances=instances,
            )
        except _CANNOT_BE_TAKEN_OVER as e:
            _log.warning("slot.not_adopted slot=%s error=%s: %s", slot.id, type(e).__name__, e)
            await _end_slot(slot, slot_allocator)


async def _adopt(
    slot: Slot,
    *,
    slot_allocator: SlotAllocator,
    template_booter: TemplateBooter,
    ends: Teardown,
    instances: Instances,
) -> None:
    if slot.is_lost:
        raise SlotConnectionLost(f"slot {slot.id} was lost during recovery")
    occupied = OccupiedSlot.of(slot)
    if occupied is None:
        await slot.end()
        return
    if occupied.transient:
        await slot_allocator.clear(occupied)
        return
    slot.owner = ends
    slot.unpark()
    slot_allocator.occupied_slots[slot.id] = occupied
    for running in list(slot.running.values()):
        _take_over(occupied, running, instances, ends)
    if slot.worker == "booting":
        occupied.is_booting = True
        template_booter.resume(occupied)
    elif slot.worker == "resident":
        if frozen_workers.can_freeze(occupied) and not await frozen_workers.freeze(occupied):
            raise SlotConnectionLost(f"slot {slot.id}: its worker is connected to others")
        template_booter.register(occupied)
    else:
        occupied.restore_cpu_priority()
        ends.clear_if_empty(occupied)
    _log.info(
        "slot.adopted slot=%s worker=%s instances=%d", slot.id, slot.worker, len(slot.running)
    )


async def _end_slot(slot: Slot, slot_allocator: SlotAllocator) -> None:
    """End the slot. Its listener, if set, records the exit of instances that were already taken
    over."""
    occupied = slot_allocator.occupied_slots.get(slot.id)
    if occupied is not None:
        await slot_allocator.clear(occupied)
    else:
        await slot.end()


def _take_over(
    occupied: OccupiedSlot, running: InstanceProcess, instances: Instances, ends: Teardown
) -> None:
    slot, note = occupied.slot, running.note
    group = Group.from_json(note["group"]) if note.get("group") else None
    if note.get("info") is None:
        slot.kill(running.id)
        if running.exited.done():
            slot.remove_exited(running)
        return
    instance = Instance(
        info=InstanceInfo.from_json(note["info"]),
        occupied=occupied,
        group=group,
        running=running,
        was_ready=True,
    )
    instances.add(instance)
    if running.exited.done():
        slot.remove_exited(running)
        ends.on_instance_exit(slot, running)


async def sweep_groups(
    cgroups: Cgroups, run: Path, slots: Iterable[Slot], instances: Instances
) -> None:
    """Remove leftover cgroups, below this agent's base and below those of earlier agents (which may
    have been started elsewhere)."""
    record = run / "cgroups.json"
    earlier = earlier_bases(run)
    here = Group(directories=dict(cgroups.bases), version=cgroups.version).to_json()
    record.write_text(json.dumps([here, *(e for e in earlier if e != here)][:8]))
    alive = {slot.id for slot in slots} | {i.group.name for i in instances if i.group is not None}
    for body in [here, *earlier]:
        base = Group.from_json(body)
        subtree = Cgroups(bases=base.directories, version=base.version)
        async with asyncio.TaskGroup() as tasks:
            for name in subtree.names() - alive:
                tasks.create_task(subtree.group(name).remove(), name=f"remove cgroup {name}")


def earlier_bases(run: Path) -> list[dict[str, object]]:
    """The bases that agents of this run directory recorded, as `Group.to_json`."""
    try:
        return list(json.loads((run / "cgroups.json").read_text()))
    except (FileNotFoundError, ValueError):
        return []
