"""Ends the slots that a node agent left behind, where no agent is going to take them over.

What belongs to a home is read from its run directory: the slots' sockets in `slots`, and the
control groups that agents recorded in `cgroups.json`, whose base is named after that directory.
Nothing is looked up by the name of a process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

from snapshotter.linux import proc, slot_network
from snapshotter.linux.cgroups import Cgroups, Group, base_name
from snapshotter.slots import sockets
from snapshotter.slots.instance_process import InstanceProcess
from snapshotter.slots.replies import SlotConnectionLost
from snapshotter.slots.slot import Slot
from snapshotter.starts.recovery import earlier_bases

_log = logging.getLogger(__name__)
_SLOT_S = 10.0
"""From the request to a shim to end until it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """How many instances, slots (with a Template, with instances, or spare) and control groups were
    ended."""

    instances: int = 0
    slots: int = 0
    groups: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing was left."""
        return not (self.instances or self.slots or self.groups)

    def __str__(self) -> str:
        counts = {
            "instance": self.instances,
            "slot": self.slots,
            "control group": self.groups,
        }
        words = [f"{n} {name}{'' if n == 1 else 's'}" for name, n in counts.items() if n]
        return ", ".join(words) or "nothing"


async def end_leftovers(run: Path, *, grace_s: float) -> Leftovers:
    """End what an agent of this run directory left: SIGTERM to instances and SIGKILL after
    `grace_s`, then their slots and control groups. A slot's namespaces, with their mounts and
    networks, end with it.

    Requires that no agent of this directory runs: it would lose its slots."""
    directories = sorted((run / "slots").glob("s-*"))
    instances = sum(
        await asyncio.gather(*(_end_slot(directory, grace_s) for directory in directories))
    )
    groups = await _remove_groups(run)
    for directory in directories:
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
    if directories:
        await slot_network.sweep()
    return Leftovers(instances=instances, slots=len(directories), groups=groups)


async def _end_slot(directory: Path, grace_s: float) -> int:
    """End one slot; returns the number of its instances."""
    try:
        connection = sockets.connect(directory / "shim.sock")
    except OSError:  # its shim has exited
        return 0
    slot = Slot(directory.name, directory, connection, -1)
    count = 0
    try:
        await slot.adopt()
        running = [each for each in slot.running.values() if not each.exited.done()]
        count = len(running)
        await asyncio.gather(*(_terminate(each, grace_s) for each in running))
    except SlotConnectionLost as e:
        _log.warning("slot.not_adopted slot=%s error=%s", slot.id, e)
    try:
        async with asyncio.timeout(_SLOT_S):
            await slot.end()
    except TimeoutError:
        if pid := slot.shim_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await slot.end()
    return count


async def _terminate(running: InstanceProcess, grace_s: float) -> None:
    if running.pidfd >= 0:
        proc.send_signal(running.pidfd, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(running.exited), grace_s)


async def _remove_groups(run: Path) -> int:
    """Kill what is in the control groups of this run directory and remove them."""
    count = 0
    for body in earlier_bases(run):
        base = Group.from_json(body)
        if any(directory.name != base_name(run) for directory in base.directories.values()):
            continue
        subtree = Cgroups(bases=base.directories, version=base.version)
        names = subtree.names()
        await asyncio.gather(*(subtree.group(name).remove() for name in names))
        subtree.remove_empty()
        count += len(names)
    return count
