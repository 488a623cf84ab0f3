"""Slots with the grants that a test gives them, made by the node agent's own allocator, on the
control groups of either version."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snapshotter.images.images import Images
from snapshotter.linux.cgroups import Cgroups, Group
from snapshotter.slots import sockets
from snapshotter.slots.allocator import SlotAllocator
from snapshotter.slots.launch_plan import NodeFiles
from snapshotter.slots.logs import Logs
from snapshotter.slots.occupied_slot import OccupiedSlot, StartPhase
from snapshotter.slots.pool import SlotPool
from snapshotter.slots.slot_devices import DeviceLayout, environment_of
from snapshotter.types import GpuGrant
from tests.fakes.agent_home import AgentHome, get, instance_id
from tests.fakes.slot_workshop import PATIENCE_S, Witness

UNIFIED = "30 25 0:27 / {point} rw,relatime - cgroup2 cgroup2 rw\n"


@dataclass(kw_only=True)
class RunningSlot:
    """A slot whose worker serves."""

    occupied: OccupiedSlot
    socket: str

    async def ask(self, path: str) -> Any:
        """What the process in the slot answers."""
        return await asyncio.to_thread(get, self.socket, path)

    async def open(self, *paths: str) -> dict[str, str]:
        """Path → name of the errno with which opening it fails inside the slot, "" if it does
        not."""
        return {path: await self.ask(f"/open{path}") for path in paths}


@dataclass(kw_only=True)
class AllocatedSlots:
    """Owner: one test."""

    home: AgentHome
    cgroups: Cgroups
    allocator: SlotAllocator
    running: list[RunningSlot] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)

    async def start(
        self, grant: GpuGrant | None = None, *, in_place: bool = True, **launch: Any
    ) -> RunningSlot:
        """A slot with this grant, and an instance in it."""
        kinds = () if grant is None else (grant.kind,)
        spec = self.home.launch(gpu=kinds, **launch)
        phase = StartPhase(gpus=grant)
        occupied = await asyncio.wait_for(self.allocator.boot(spec, phase, Witness()), PATIENCE_S)
        name = instance_id()
        group = occupied.group
        if not in_place:
            group = self.cgroups.make(name, memory_bytes=spec.memory_bytes, cpu=1.0)
            self.groups.append(group)
        socket = occupied.slot.directory / f"{name}.sock"
        running = occupied.slot.start(
            name,
            env={**spec.env, **environment_of(grant)},
            cgroup=group.entry_files(),
            note={"info": None},
            in_place=in_place,
            listener=sockets.listen(socket).detach(),
        )
        await asyncio.wait_for(running.ready, PATIENCE_S)
        made = RunningSlot(occupied=occupied, socket=str(socket))
        self.running.append(made)
        return made

    async def clear(self, slot: RunningSlot) -> None:
        """End the slot."""
        self.running.remove(slot)
        await self.allocator.clear(slot.occupied)


def plant(slot: RunningSlot, directory: Path, names: list[str]) -> str:
    """Make copies of these nodes of `directory` in the slot, where devices may be opened, as root
    of the machine; returns the directory in the slot. What a slot cannot do itself, but a mistake
    could."""
    at = "/run/pilotlight/slot/tmp"
    commands = ["umask 0", f"mount -t tmpfs -o dev,mode=755 tmpfs {at}"]
    for name in names:
        number = (directory / name).lstat().st_rdev
        target = f"{at}/{name.replace('/', '-')}"
        node = f"c {os.major(number)} {os.minor(number)}"
        commands.append(f"mknod {target} {node}")
    subprocess.run(
        ["nsenter", "-t", str(slot.occupied.slot.shim_pid), "-m", "sh", "-ec", "; ".join(commands)],
        check=True,
        timeout=20,
    )
    return at


def find_groups(run: Path, directory: Path, *, version: int) -> Cgroups:
    """This machine's control groups, or those of its unified hierarchy alone."""
    if version == 1:
        return Cgroups.find(run)
    points = [
        line.split()[4]
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if " - cgroup2 " in line
    ]
    if not points:
        return Cgroups(bases={}, version=0, why_no_devices="no unified hierarchy is mounted")
    (directory / "mountinfo").write_text(UNIFIED.format(point=points[0]))
    own = [
        line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0:")
    ]
    (directory / "cgroup").write_text("\n".join(own))
    return Cgroups.find(run, proc=directory)


@contextlib.asynccontextmanager
async def allocated_slots(
    home: AgentHome, cgroups: Cgroups, layout: DeviceLayout
) -> AsyncIterator[AllocatedSlots]:
    """An allocator with a slot pool; everything in it is ended."""
    logs = Logs(home.paths.home / "node" / "logs")
    pool = SlotPool(
        home.paths.run / "s",
        logs.directory,
        log_max_bytes=1024**2,
        namespaced=os.geteuid() == 0,
        groups=set(cgroups.bases.values()),
    )
    allocator = SlotAllocator(
        slot_pool=pool,
        files=NodeFiles(
            bundles=home.bundles,
            images=Images(home.paths.home, environ=os.environ, requirements=()),
            weights=home.weights,
            runtime=home.runtime,
            gpus=layout,
        ),
        cgroups=cgroups,
        logs=logs,
    )
    made = AllocatedSlots(home=home, cgroups=cgroups, allocator=allocator)
    try:
        yield made
    finally:
        for occupied in list(allocator.occupied_slots.values()):
            await allocator.clear(occupied)
        await pool.aclose()
        for group in made.groups:
            await group.remove()
        cgroups.remove_empty()
