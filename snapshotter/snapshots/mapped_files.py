"""The files that a restored process requires: libraries it has mapped, files it holds open.

CRIU rejects an image if the size of one of them differs, but would restore a broken process if only
the content differs. Files in content-addressed binds (code, weights, a built image's packages)
cannot change; other files of the host can, and an upgraded library is detected here before CRIU
starts. Paths are those in the slot, the same on every node; binds map them to the host's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from snapshotter.shim.sandbox import mounts
from snapshotter.snapshots.hash_cache import HashCache
from snapshotter.snapshots.manifest import FileMark, SnapshotInvalid

_OWN_TO_SLOT = (
    "/tmp",
    "/var/tmp",
    "/run",
    "/dev",
    "/proc",
    "/sys",
    "/memfd:",
    "/SYSV",
    "/anon_hugepage",
)
"""Recreated in each slot, contained in the image or files.tar, or not files at all; `mounts.ROOT`
below /run has binds."""
_DELETED = " (deleted)"
IMMUTABLE = ("code", "weights")
"""Binds named by their content."""


@dataclass(frozen=True, slots=True)
class BindMounts:
    """Maps in-slot paths to host paths.

    Attributes:
        pairs: (host path, path below the slot's root), as in the boot order.
        immutable: names of binds, or their part before the first `/`, whose content never changes.
        rootfs: root file system of the image, for paths not below the slot's root; "" = the host's.
    """

    pairs: tuple[tuple[str, str], ...]
    immutable: tuple[str, ...] = IMMUTABLE
    rootfs: str = ""

    @classmethod
    def of(
        cls, binds: Iterable[Sequence[str]], *, built_image: bool, rootfs: str = ""
    ) -> BindMounts:
        """Create from the boot order's binds. `built_image`: its packages (`env/…`) are named by
        the image's digest."""
        pairs = tuple((str(host), str(name)) for host, name in binds)
        return cls(pairs, (*IMMUTABLE, "env") if built_image else IMMUTABLE, rootfs)

    def host_path(self, path: str) -> str | None:
        """The host path of in-slot `path`; None if below the slot's root and outside every bind."""
        if not _is_below(path, mounts.ROOT):
            return self.rootfs + path
        for host, name in self.pairs:
            target = f"{mounts.ROOT}/{name}"
            if _is_below(path, target):
                return host + path[len(target) :]
        return None

    def may_change(self, path: str) -> bool:
        """True if in-slot `path` is a file of the host whose content can change."""
        if _is_below(path, mounts.ROOT):
            name = path[len(mounts.ROOT) + 1 :]
            return self.host_path(path) is not None and name.partition("/")[0] not in self.immutable
        return path.startswith("/") and not any(
            _is_below(path, own) or path.startswith(f"{own}:") for own in _OWN_TO_SLOT
        )


def paths_of(maps: str, open_files: Iterable[str]) -> tuple[str, ...]:
    """In-slot paths in the text of /proc/<pid>/maps and in the link targets of /proc/<pid>/fd;
    sorted, without duplicates.

    Pipes, sockets and anonymous memory have no path; deleted files are in the image. Source:
    proc_pid_maps(5)."""
    columns = (line.split(maxsplit=5) for line in maps.splitlines())
    named = {row[5] for row in columns if len(row) == 6} | set(open_files)
    return tuple(
        sorted(path for path in named if path.startswith("/") and not path.endswith(_DELETED))
    )


async def record(paths: Iterable[str], binds: BindMounts, memory: HashCache) -> dict[str, FileMark]:
    """Size and hash of those of `paths` that may change, by in-slot path. Directories and devices
    are skipped.

    Raises OSError if a file does not exist.
    """
    files = await asyncio.to_thread(_files_that_may_change, paths, binds)
    marks = await memory.marks(files.values(), follow=True)
    return {path: marks[host] for path, host in files.items()}


def _files_that_may_change(paths: Iterable[str], binds: BindMounts) -> dict[str, Path]:
    hosts = {
        path: Path(host)
        for path in paths
        if binds.may_change(path) and (host := binds.host_path(path)) is not None
    }
    return {path: host for path, host in hosts.items() if host.is_file() or not host.exists()}


def is_known(path: str, mark: FileMark, binds: BindMounts, memory: HashCache) -> bool:
    """True if in-slot `path` is known to be unchanged: one stat(2)."""
    host = binds.host_path(path)
    return host is not None and memory.knows(host, mark, follow=True)


async def is_same(path: str, mark: FileMark, binds: BindMounts, memory: HashCache) -> bool:
    """True if in-slot `path` has that content on this host; read if stat(2) is inconclusive."""
    host = binds.host_path(path)
    if host is None:
        return False
    try:
        return (await memory.marks([Path(host)], follow=True))[Path(host)] == mark
    except (OSError, SnapshotInvalid):
        return False


def _is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(f"{directory}/")
