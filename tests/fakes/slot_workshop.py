"""Slots without an agent above them: boot the small worker in one, dump it, restore it into others,
and look what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snapshotter.criu import operations, page_map
from snapshotter.criu.bundle import CriuBundle
from snapshotter.criu.lazy import PageRequest
from snapshotter.criu.processes import Criu
from snapshotter.images.images import Images
from snapshotter.linux.cgroups import Cgroups, Group
from snapshotter.slots import launch_plan, sockets
from snapshotter.slots.instance_process import InstanceProcess
from snapshotter.slots.launch_plan import Sources
from snapshotter.slots.pool import SlotPool
from snapshotter.slots.replies import QuiesceResult
from snapshotter.slots.slot import Slot
from snapshotter.slots.slot_devices import NO_DEVICES, SlotDevices
from snapshotter.types import InstanceId, LaunchSpec
from tests.fakes.agent_home import AgentHome, get, instance_id

PATIENCE_S = 20.0


@dataclass
class Witness:
    """An owner of slots that remembers what it is told."""

    said: list[tuple[str, Any]] = field(default_factory=list)

    def on_instance_exit(self, slot: Slot, running: InstanceProcess) -> None:
        """Heard."""
        self.said.append(("instance_gone", running.id))

    def on_worker_exit(self, slot: Slot, status: int | None) -> None:
        """Heard."""
        self.said.append(("worker_gone", status))

    def on_slot_lost(self, slot: Slot) -> None:
        """Heard."""
        self.said.append(("slot_gone", slot.id))

    def log_dropped(self, count: int) -> None:
        """Heard."""

    def on_parked(self, slot: Slot) -> None:
        """Heard."""

    def on_parked_exit(self, slot: Slot, name: str) -> None:
        """Heard."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """A dump on disk."""

    directory: Path
    files: Path
    point: Mapping[str, Any]
    quiesced: QuiesceResult
    in_place: bool
    spec: LaunchSpec

    def holds(self, planted: bytes) -> bool:
        """Whether any file of it contains these bytes."""
        return any(planted in path.read_bytes() for path in [*self.directory.iterdir(), self.files])


@dataclass(kw_only=True)
class Place:
    """A slot in use, with its group."""

    slot: Slot
    group: Group
    spec: LaunchSpec
    witness: Witness
    ms: dict[str, float] = field(default_factory=dict)

    @property
    def uid(self) -> int:
        """Of its worker."""
        return self.spec.uid or 0


class Workshop:
    """Owner: one test."""

    def __init__(
        self, home: AgentHome, slot_pool: SlotPool, cgroups: Cgroups, criu: Criu, kdat: Path | None
    ) -> None:
        self.home = home
        self.slot_pool = slot_pool
        self.cgroups = cgroups
        self.criu = criu
        self.kdat = kdat
        self.images = Images(home.paths.home, environ=os.environ, requirements=())
        self.kit: CriuBundle | None = None
        self.places: list[Place] = []
        self.devices: SlotDevices = NO_DEVICES

    async def take(self, spec: LaunchSpec) -> tuple[Place, Mapping[str, Any]]:
        """A slot with a group and a launch file, and the order to boot in it."""
        began = time.perf_counter()
        slot = await self.slot_pool.acquire()
        place = Place(slot=slot, group=self.cgroups.group(slot.id), spec=spec, witness=Witness())
        slot.owner = place.witness
        self.places.append(place)
        place.group = self.cgroups.make(
            slot.id, memory_bytes=spec.memory_bytes, cpu=spec.cpu, devices=self.devices.rules
        )
        code = self.home.paths.home.parent / "code"
        code.mkdir(exist_ok=True)
        layout, kit = (
            self.images.layout(spec.image, uid=spec.uid),
            None if self.kit is None else self.kit.directory,
        )
        sources = Sources(layout=layout, code=code, weights={}, runtime=self.home.runtime, criu=kit)
        limits = launch_plan.limits(spec, uid=spec.uid, limits_memory=True, limits_pids=True)
        plan = launch_plan.plan(
            spec,
            sources,
            directory=slot.directory,
            uid=spec.uid,
            namespaced=True,
            limits=limits,
            devices=self.devices,
        )
        sockets.write_json(slot.directory / "launch.json", plan.launch_file, mode=0o444)
        place.ms["slot"] = (time.perf_counter() - began) * 1000
        return place, plan.order

    async def boot(self, **changes: Any) -> Place:
        """The small worker at its snapshot point."""
        place, order = await self.take(self.home.launch(**changes))
        place.slot.boot(order, place.group.entry_files())
        await asyncio.wait_for(place.slot.point, PATIENCE_S)
        return place

    async def start(
        self, place: Place, *, in_place: bool = False, env: Mapping[str, str] | None = None
    ) -> InstanceProcess:
        """A ready instance."""
        name = instance_id()
        listener = sockets.listen(place.slot.directory / f"{name}.sock").detach()
        running = place.slot.start(
            name,
            env=env or {},
            cgroup=place.group.entry_files(),
            note={"info": None},
            in_place=in_place,
            listener=listener,
        )
        await asyncio.wait_for(running.ready, PATIENCE_S)
        return running

    async def ask(self, place: Place, running: InstanceProcess, path: str) -> Any:
        """What it answers."""
        return await asyncio.to_thread(get, str(place.slot.directory / f"{running.id}.sock"), path)

    async def stop(self, running: InstanceProcess, slot: Slot) -> None:
        """SIGKILL, and wait."""
        slot.kill(InstanceId(running.id))
        await asyncio.wait_for(running.exited, PATIENCE_S)

    async def quiesce(
        self, place: Place, *, in_place: bool = False, name: str = "c-1"
    ) -> QuiesceResult:
        """Have it stand still."""
        kdat = os.open(self.kdat or os.devnull, os.O_RDONLY)
        try:
            cgroup = place.group.entry_files()
            return await asyncio.wait_for(
                place.slot.checkpoint(name, cgroup, in_place=in_place, kdat=kdat), PATIENCE_S
            )
        finally:
            os.close(kdat)

    async def dump(self, place: Place, *, in_place: bool = False, name: str = "c-1") -> Image:
        """Stand still, dump, keep the files."""
        directory = self.home.paths.home / f"image-{secrets.token_hex(4)}"
        point = place.slot.point.result().to_json()
        quiesced = await self.quiesce(place, in_place=in_place, name=name)
        directory.mkdir()
        with self.opened(directory, place) as (images, work):
            await operations.dump(
                place.slot,
                criu=self.criu,
                pid=quiesced.pid,
                images=images,
                work=work,
                uid=place.uid,
                cgroup=place.group.entry_files(),
                tcp=in_place,
                deadline_s=PATIENCE_S,
            )
        page_map.write_page_maps(directory)
        files = directory.with_suffix(".tar")
        with files.open("xb") as f:
            await asyncio.wait_for(place.slot.save_files(name, f.fileno()), PATIENCE_S)
        return Image(
            directory=directory,
            files=files,
            point=point,
            quiesced=quiesced,
            in_place=in_place,
            spec=place.spec,
        )

    async def prepare_restore(self, image: Image) -> Place:
        """A slot that a restore may begin in."""
        place, order = await self.take(image.spec)
        began = time.perf_counter()
        kdat = os.open(self.kdat or os.devnull, os.O_RDONLY)
        files = os.open(image.files, os.O_RDONLY)
        try:
            await asyncio.wait_for(place.slot.prepare_restore(order, kdat, files), PATIENCE_S)
        finally:
            os.close(kdat)
            os.close(files)
        place.ms["furnish"] = (time.perf_counter() - began) * 1000
        return place

    async def restore(
        self, image: Image, *, lazy: bool = False, deadline_s: float = PATIENCE_S
    ) -> Place:
        """Into a fresh slot, up to its snapshot point."""
        place = await self.prepare_restore(image)
        began = time.perf_counter()
        with self.opened(image.directory, place) as (images, work):
            restored = await operations.restore(
                place.slot,
                criu=self.criu,
                images=images,
                work=work,
                uid=place.uid,
                cgroup=place.group.entry_files(),
                stdio_keys=image.quiesced.stdio,
                lazy=PageRequest() if lazy else None,
                tcp=image.in_place,
                deadline_s=deadline_s,
            )
        place.ms["criu"] = (time.perf_counter() - began) * 1000
        began = time.perf_counter()
        await place.slot.resume(restored.pid, image.point, PATIENCE_S)
        place.ms["revive"] = (time.perf_counter() - began) * 1000
        return place

    @contextlib.contextmanager
    def opened(self, directory: Path, place: Place) -> Iterator[tuple[int, int]]:
        """The image's directory and a working directory."""
        work = place.slot.directory / "criu"
        work.mkdir(mode=0o700, exist_ok=True)
        fds = [os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in (directory, work)]
        try:
            yield fds[0], fds[1]
        finally:
            for fd in fds:
                os.close(fd)

    async def clear(self, place: Place) -> None:
        """End the slot."""
        await place.slot.end()
        await place.group.remove()
        self.places.remove(place)

    def log(self, place: Place, name: str | None = None) -> str:
        """What the slot's worker, or an instance, printed."""
        path = self.home.paths.home / "logs" / f"{name or place.slot.id}.log"
        return path.read_text() if path.exists() else ""


@contextlib.asynccontextmanager
async def workshop(home: AgentHome, criu: Criu, kdat: Path | None) -> AsyncIterator[Workshop]:
    """One with a slot pool; everything in it is ended."""
    logs = home.paths.home / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    cgroups = Cgroups.find(home.paths.run)
    slot_pool = SlotPool(
        home.paths.run / "s",
        logs,
        log_max_bytes=1024**2,
        namespaced=True,
        groups=set(cgroups.bases.values()),
    )
    shop = Workshop(home, slot_pool, cgroups, criu, kdat)
    try:
        yield shop
    finally:
        for place in list(shop.places):
            await shop.clear(place)
        await slot_pool.aclose()
