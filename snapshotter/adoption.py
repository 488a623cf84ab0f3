"""A new agent takes over what an earlier one left: slots that live are mirrored, everything else is swept away.

Nothing is read from a journal on disk but what does not change (`housing.json`); what runs, and how it ended, the shims know.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable
from pathlib import Path

from snapshotter.boots import Boots
from snapshotter.cgroups import Cgroups, Group
from snapshotter.ends import Ends
from snapshotter.housing import Housekeeper, Housing
from snapshotter.instances import Instance, Instances
from snapshotter.nursery import Nursery
from snapshotter.running import Running
from snapshotter.slots import BootFailed, Slot, SlotLost
from snapshotter.types import InstanceInfo

_log = logging.getLogger(__name__)
_CANNOT_BE_TAKEN_OVER = (SlotLost, BootFailed, OSError, ValueError, LookupError, TypeError, AttributeError, asyncio.InvalidStateError)
"""What one slot may raise whose shim or files are not as this agent's would be: another version's, or broken."""


async def adopt(*, nursery: Nursery, housekeeper: Housekeeper, boots: Boots, ends: Ends, instances: Instances) -> None:
    """Take over every slot that lives. Instances keep their InstanceInfo; those that never were handed out are ended.

    A slot that cannot be taken over is ended with all that is in it: the others, and the agent, go on without it.
    """
    for slot in await nursery.adopt():
        try:
            await _adopt(slot, housekeeper=housekeeper, boots=boots, ends=ends, instances=instances)
        except _CANNOT_BE_TAKEN_OVER as e:
            _log.warning("slot.not_adopted slot=%s error=%s: %s", slot.id, type(e).__name__, e)
            await _give_up(slot, housekeeper)


async def _adopt(slot: Slot, *, housekeeper: Housekeeper, boots: Boots, ends: Ends, instances: Instances) -> None:
    if slot.is_lost:
        raise SlotLost(f"slot {slot.id} went away meanwhile")
    housing = Housing.of(slot)
    if housing is None:
        await slot.end()
        return
    if housing.transient:
        await housekeeper.clear(housing)
        return
    slot.owner = ends
    slot.unpark()
    housekeeper.housings[slot.id] = housing
    for running in list(slot.running.values()):
        _take_over(housing, running, instances, ends)
    if slot.worker == "booting":
        housing.is_booting = True
        boots.resume(housing)
    elif slot.worker == "resident":
        boots.enlist(housing)
    else:
        housing.take_part()
        ends.clear_if_empty(housing)
    _log.info("slot.adopted slot=%s worker=%s instances=%d", slot.id, slot.worker, len(slot.running))


async def _give_up(slot: Slot, housekeeper: Housekeeper) -> None:
    """Its owner, if it has one by now, settles the instances that were taken over already."""
    housing = housekeeper.housings.get(slot.id)
    if housing is not None:
        await housekeeper.clear(housing)
    else:
        await slot.end()


def _take_over(housing: Housing, running: Running, instances: Instances, ends: Ends) -> None:
    slot, note = housing.slot, running.note
    group = Group.from_json(note["group"]) if note.get("group") else None
    if note.get("info") is None:
        slot.kill(running.id)
        if running.gone.done():
            slot.forget(running)
        return
    instance = Instance(info=InstanceInfo.from_json(note["info"]), housing=housing, group=group, running=running, was_ready=True)
    instances.add(instance)
    if running.gone.done():
        slot.forget(running)
        ends.instance_gone(slot, running)


async def sweep_groups(cgroups: Cgroups, run: Path, slots: Iterable[Slot], instances: Instances) -> None:
    """Remove cgroups of the dead, below this agent's base and below those of earlier agents (it may have been started elsewhere)."""
    record = run / "cgroups.json"
    earlier = _earlier(record)
    here = Group(directories=dict(cgroups.bases), version=cgroups.version).to_json()
    record.write_text(json.dumps([here, *(e for e in earlier if e != here)][:8]))
    alive = {slot.id for slot in slots} | {i.group.name for i in instances if i.group is not None}
    for body in [here, *earlier]:
        base = Group.from_json(body)
        subtree = Cgroups(bases=base.directories, version=base.version)
        async with asyncio.TaskGroup() as tasks:
            for name in subtree.names() - alive:
                tasks.create_task(subtree.group(name).remove(), name=f"remove cgroup {name}")


def _earlier(record: Path) -> list[dict[str, object]]:
    try:
        return list(json.loads(record.read_text()))
    except (FileNotFoundError, ValueError):
        return []
