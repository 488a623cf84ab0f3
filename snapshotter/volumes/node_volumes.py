"""The working directories of volumes on this node.

A volume has one directory here, of its tenant's uid, that every slot of its tenant and environment
mounts which declares it. It is made when a slot first needs it, and brought up to date when a slot
starts while no other uses it, and by `reload`. The directory is the node's cache of the volume: a
file is fetched if its content differs from what is here.

`<home>/node/volumes/<id>/` has `data/` (what slots mount), `volume.json` (whose it is), `version`
(of the last sync or commit) and the files of `mover`. What belongs to a volume is decided by the
controller alone, which the agent asks by the launch document's tenant, environment and name."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from pilotlight.core.disk_floor import BelowFloor, DiskFloor
from pilotlight.core.volumes.entries import VOLUME_ID
from snapshotter.errors import StartFailed, Unsupported, VolumeFailed, VolumeUnknown
from snapshotter.linux.cgroups import Cgroups
from snapshotter.linux.short_commands import run_command
from snapshotter.types import LaunchSpec
from snapshotter.volumes.heads import VolumeHeads
from snapshotter.volumes.mover_process import run_mover

_log = logging.getLogger(__name__)
_REMOVE_S, _MEASURE_S = 600.0, 30.0
DELETED = "deleted"
MOVERS_AT_ONCE = 8
"""Of all tenants: each has up to `mover_process.MEMORY_BYTES`."""
MOVERS_OF_TENANT = 3
"""Others start while one tenant reads or fetches large volumes."""

VolumeKey = tuple[str, str, str]
"""Tenant id, environment and name."""
FindKeys = Callable[[], AbstractSet[VolumeKey]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Where the blob store is: `where` as platform.blobs, `client` as platform.s3_client, and the
    uid that owns it (None: the agent's)."""

    where: str
    client: str
    uid: int | None

    @property
    def is_directory(self) -> bool:
        """Whether it is on a disk of this machine."""
        return "://" not in self.where


class NodeVolumes:
    """The volumes of this node. Owner: the event loop."""

    def __init__(
        self,
        home: Path,
        *,
        heads: VolumeHeads,
        store: StoreAddress,
        floor: DiskFloor,
    ) -> None:
        """`home`: the platform's."""
        self._directory = home / "node" / "volumes"
        self._heads = heads
        self._store = store
        self._floor = floor
        self._locks: dict[str, asyncio.Lock] = {}
        self._turns = asyncio.Semaphore(MOVERS_AT_ONCE)
        self._turns_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._cgroups: Cgroups | None = None
        self._in_slots: FindKeys = frozenset
        self._in_instances: FindKeys = frozenset

    def __repr__(self) -> str:
        return f"<NodeVolumes {self._directory}>"

    def attach(self, cgroups: Cgroups, *, in_slots: FindKeys, in_instances: FindKeys) -> None:
        """Set the control groups of movers, and what tells which volumes slots have mounted, and
        which live instances use. Call before the first operation."""
        self._cgroups, self._in_slots, self._in_instances = cgroups, in_slots, in_instances

    async def refresh(self, launch: LaunchSpec) -> None:
        """Bring the volumes of a launch up to date that slots have mounted, before an instance
        starts from a process in one of them; a new slot does so itself. What fails is logged: it
        starts with what is here."""
        if self._in_slots().isdisjoint(volume_keys(launch)):
            return
        with contextlib.suppress(Unsupported):
            try:
                await self.prepare(launch)
            except StartFailed as e:
                _log.warning("volume.not_refreshed revision=%s error=%s", launch.revision, e)

    async def prepare(self, launch: LaunchSpec) -> dict[str, Path]:
        """Return the directories of a launch's volumes by mount path, up to date unless a live
        instance uses them. Raises StartFailed, Unsupported."""
        found: dict[str, Path] = {}
        for mount in launch.volumes:
            if launch.uid is None:
                raise Unsupported(
                    f"revision {launch.revision} mounts volume {mount.name!r}, which needs a "
                    f"platform that runs as root: only there do slots have mounts of their own"
                )
            key: VolumeKey = (launch.tenant, launch.labels.get("environment", ""), mount.name)
            try:
                found[mount.path] = await self._provide(key, launch.uid)
            except (VolumeFailed, VolumeUnknown) as e:
                raise StartFailed(
                    f"revision {launch.revision} cannot mount volume {mount.name!r}: {e}", e.detail
                ) from e
        return found

    async def _provide(self, key: VolumeKey, uid: int) -> Path:
        try:
            head = await self._heads.head(key)
        except VolumeFailed:
            # the controller is away: what is here serves
            if (home := await asyncio.to_thread(self._find, key)) is None:
                raise
            _log.warning("volume.not_asked volume=%s", home.name)
            return home / "data"
        home = self._directory / head.id
        async with self._lock(head.id):
            is_new = await asyncio.to_thread(self._make, home, key, uid)
            is_used = key in self._in_instances()
            if is_new or (not is_used and self._version(home) != head.version):
                await self._sync(home, key)
            (home / "version").touch()  # its last use, by which directories are evicted
        return home / "data"

    async def reload(self, volume_id: str) -> Mapping[str, Any]:
        """Merge the newest manifest into the volume's directory. Raises VolumeUnknown,
        VolumeFailed."""
        home = self._known(volume_id)
        async with self._lock(volume_id):
            return await self._sync(home, self._key(home))

    async def scan(
        self, volume_id: str, *, max_entries: int
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield what differs from the last commit: `{"put": […]}`, `{"remove": […]}`, `{"done"}`.
        Raises VolumeUnknown, VolumeFailed."""
        home = self._known(volume_id)
        async with self._lock(volume_id):
            order = {**self._order("scan", home), "max_entries": max_entries}
            async with (
                self.turn(order["tenant"]),
                contextlib.aclosing(run_mover(self._groups, order)) as answers,
            ):
                async for answer in answers:
                    if "done" in answer:
                        (home / "scan.json.new").rename(home / "scan.json")
                    yield answer

    async def upload(self, volume_id: str, digests: Collection[str]) -> None:
        """Upload chunks that the last scan found. Raises VolumeUnknown, VolumeFailed."""
        home = self._known(volume_id)
        async with self._lock(volume_id):
            order = {**self._order("upload", home), "digests": list(digests)}
            if not self._store.is_directory:
                await self._run(order)
                return
            try:
                await self._floor.guard(self._run(order))
            except BelowFloor as e:
                raise VolumeFailed(str(e.strerror), {"reason": "disk_full"}) from e

    async def committed(self, volume_id: str, *, version: int) -> None:
        """Take what the last scan found for committed, as `version`. Raises VolumeUnknown."""
        home = self._known(volume_id)
        async with self._lock(volume_id):
            before = self._version(home)
            if (home / "scan.json").exists():
                (home / "scan.json").rename(home / "state.json")
            if before == version - 1:  # otherwise others committed what is not here
                self._write(home / "version", str(version))

    async def drop(self, volume_id: str) -> None:
        """Remove the directory of a deleted volume once no slot uses it. Idempotent."""
        home = self._directory / volume_id
        if VOLUME_ID.match(volume_id) and home.is_dir():
            (home / DELETED).touch()
            await self.sweep()

    async def sweep(self) -> None:
        """Remove the directories of deleted volumes that no slot uses."""
        for mark in await asyncio.to_thread(lambda: list(self._directory.glob(f"*/{DELETED}"))):
            home = mark.parent
            async with self._lock(home.name):
                if self._key(home) not in self._in_slots():
                    await self._remove(home)

    @property
    def is_used(self) -> bool:
        """Whether a volume was ever used on this node."""
        return self._directory.is_dir()

    async def evict_one(self) -> bool:
        """Remove the directory of the volume that was used longest ago, of those that no slot has
        mounted; False if there is none. What was not committed is lost."""
        for home in await asyncio.to_thread(self._by_use):
            async with self._lock(home.name):
                if self._key(home) not in self._in_slots():
                    _log.warning("volume.evicted volume=%s", home.name)
                    await self._remove(home)
                    return True
        return False

    async def largest_mounted(self) -> tuple[VolumeKey, int] | None:
        """The volume that takes most of the disk, of those that slots have mounted, and its size in
        bytes."""
        used, found = self._in_slots(), []
        for home in await asyncio.to_thread(self._by_use):
            if (key := self._key(home)) in used:
                with contextlib.suppress(TimeoutError, ValueError, IndexError):
                    _, out = await run_command("du", "-sxB1", home / "data", timeout_s=_MEASURE_S)
                    found.append((int(out.split()[0]), key))
        if not found:
            return None
        size_bytes, key = max(found)
        return key, size_bytes

    def _by_use(self) -> list[Path]:
        marks = self._directory.glob("*/version")
        return [mark.parent for mark in sorted(marks, key=lambda mark: mark.stat().st_mtime)]

    async def _remove(self, home: Path) -> None:
        """Remove a tree that a tenant's code made, whatever its depth: rm(1) opens each directory
        below the descriptor of the one above, and follows no link."""
        with contextlib.suppress(TimeoutError):
            await run_command("rm", "-rf", "--one-file-system", home, timeout_s=_REMOVE_S)

    async def _sync(self, home: Path, key: VolumeKey) -> Mapping[str, Any]:
        version = await self._heads.fetch(key, home.name, home / "head.json")
        order = {**self._order("sync", home), "floor_bytes": self._floor.floor_bytes}
        found = await self._run(order)
        self._write(home / "version", str(version))
        (home / "head.json").unlink(missing_ok=True)
        if found["changed"]:
            _log.info("volume.synced volume=%s version=%s %s", home.name, version, found)
        return {"version": version, **found}

    @property
    def _groups(self) -> Cgroups:
        assert self._cgroups is not None, "attach was not called"
        return self._cgroups

    def _order(self, op: str, home: Path) -> dict[str, Any]:
        whose = json.loads((home / "volume.json").read_text())
        return {
            "op": op,
            "home": str(home),
            "uid": whose["uid"],
            "tenant": whose["key"][0],
            "store": {"where": self._store.where, "client": self._store.client},
            "store_uid": self._store.uid,
        }

    async def _run(self, order: Mapping[str, Any]) -> Mapping[str, Any]:
        done: Mapping[str, Any] = {}
        async with (
            self.turn(order["tenant"]),
            contextlib.aclosing(run_mover(self._groups, order)) as answers,
        ):
            async for answer in answers:
                done = answer.get("done", done)
        return done

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str) -> AsyncGenerator[None, None]:
        """Hold one of the movers, first one of those of the tenant, so that it holds none of the
        others' while it waits."""
        of_tenant = self._turns_of.get(tenant)
        if of_tenant is None:
            of_tenant = self._turns_of[tenant] = asyncio.Semaphore(MOVERS_OF_TENANT)
        async with of_tenant, self._turns:
            yield

    def _make(self, home: Path, key: VolumeKey, uid: int) -> bool:
        """Create the directory unless it is there; returns whether it is empty still."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (home / "volume.json").exists():
            for name in (home, home / "incoming", home / "data"):
                name.mkdir(mode=0o700, exist_ok=True)
            os.chown(home / "data", uid, uid)
            (home / "data").chmod(0o755)
            self._write(home / "volume.json", json.dumps({"key": list(key), "uid": uid}))
        return not (home / "version").exists()

    def _find(self, key: VolumeKey) -> Path | None:
        for mark in self._directory.glob("*/version"):
            if self._key(mark.parent) == key and not (mark.parent / DELETED).exists():
                return mark.parent
        return None

    def _known(self, volume_id: str) -> Path:
        home = self._directory / volume_id
        if not VOLUME_ID.match(volume_id) or not (home / "version").exists():
            raise VolumeUnknown(f"volume {volume_id[:40]} is not on this node")
        return home

    def _key(self, home: Path) -> VolumeKey:
        tenant, environment, name = json.loads((home / "volume.json").read_text())["key"]
        return tenant, environment, name

    def _version(self, home: Path) -> int:
        try:
            return int((home / "version").read_text())
        except (FileNotFoundError, ValueError):
            return -1

    def _write(self, path: Path, text: str) -> None:
        fresh = path.with_name(path.name + ".new")
        fresh.write_text(text)
        fresh.rename(path)

    def _lock(self, volume_id: str) -> asyncio.Lock:
        return self._locks.setdefault(volume_id, asyncio.Lock())


def volume_keys(launch: LaunchSpec) -> set[VolumeKey]:
    """The volumes that a launch mounts."""
    environment = launch.labels.get("environment", "")
    return {(launch.tenant, environment, mount.name) for mount in launch.volumes}
