"""Detects what blocks a snapshot: external connections, and kernel objects that CRIU cannot dump.

The scan reads the descriptors and mappings of the process and of its descendants; CRIU itself
detects some of these only when the image is restored. Not blockers, since CRIU can dump them:
pipes, epoll, eventfd, inotify, memfd, shared memory, semaphores, child processes, connections with
both ends inside the tree, and listeners (which are reported, so that the instance gets its own
network)."""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pilotlight.worker.process import tensor_memory
from pilotlight.worker.snapshot import sockets
from pilotlight.worker.snapshot.processes import (
    all_processes,
    descendants,
    open_links,
    process_name,
)
from pilotlight.worker.snapshot.sockets import Socket
from pilotlight.worker.user_code.source_locations import SocketOrigins

GHOST_BYTES = 64 * 1024**2
"""Largest deleted file that an image contains (CRIU's `--ghost-limit`, as our dumps set it)."""
MAX_NAMED = 20
"""Maximum number of reported obstacles: the message must fit into a datagram."""

_ANONYMOUS = frozenset(
    {"eventfd", "eventpoll", "inotify", "signalfd", "timerfd", "pidfd", "fanotify"}
)
"""Anonymous inodes that CRIU supports; it rejects all others."""
_HARMLESS = frozenset({"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"})
_GPU = "/dev/nvidia"
"""The agent detaches the process from these devices before the dump, and reports those it cannot
detach (`snapshotter/cuda`)."""
_SHARED_MEMORY = ("/dev/shm/", "/dev/zero (deleted)", "/memfd:", "/SYSV", "/dev/hugepages/")
_WAY_OUT = "or open it in @enter(snap=False)"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotBlocker:
    """One obstacle to a snapshot.

    Attributes:
        kind: `connection`, `socket`, `io_uring`, `descriptor`, `file`, `device`, `memory` or
            `process`.
        fd: the descriptor; None for a mapping or a process.
        what: a short name, such as `TCP to 10.0.0.2:443`.
        where: the user's `file:line`, if known.
        message: a sentence that names the obstacle and its remedy.
    """

    kind: str
    fd: int | None
    what: str
    where: str | None
    message: str

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "kind": self.kind,
            "fd": self.fd,
            "what": self.what,
            "where": self.where,
            "message": self.message,
        }


@dataclass(slots=True, kw_only=True)
class ScanFindings:
    """Result of a scan. Filled by `look` only.

    Attributes:
        listens: addresses of TCP listeners.
        connections_inside: number of TCP connections with both ends in the tree, for which a dump
            needs `tcp_established`.
    """

    obstacles: list[SnapshotBlocker] = field(default_factory=list)
    listens: list[str] = field(default_factory=list)
    connections_inside: int = 0

    def to_json(self) -> dict[str, Any]:
        """As JSON values, to be merged into a message."""
        return {
            "obstacles": [one.to_json() for one in self.obstacles[:MAX_NAMED]],
            "listens": sorted(set(self.listens)),
            "connections_inside": self.connections_inside,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockerScan:
    """A scan for obstacles.

    Attributes:
        writable: directories whose files are part of the snapshot.
        places: the source locations that created sockets.
        volumes: mount paths of volumes, whose files may differ when a snapshot is restored.
    """

    writable: tuple[str, ...]
    places: SocketOrigins
    volumes: tuple[str, ...] = ()

    def scan(self, *, leave_aside: Collection[int] = (), pairs: bool = True) -> ScanFindings:
        """Scan this process and its descendants.

        Args:
            leave_aside: our own descriptors, which will be closed before the dump.
            pairs: whether TCP connections with both ends inside are allowed; only a dump of a
                worker with all its processes can keep them.
        """
        found = ScanFindings()
        me = os.getpid()
        processes = [me, *descendants(me)]
        links = {pid: list(open_links(pid, leave_aside if pid == me else ())) for pid in processes}
        self._inspect_sockets(found, links, me, pairs=pairs)
        for pid in processes:
            owner = "" if pid == me else f" of process {process_name(pid)}"
            for fd, link in links[pid]:
                found.obstacles += self._of_link(pid, fd, link, owner)
            found.obstacles += _of_maps(pid, owner)
            found.obstacles += _of_volumes(pid, links[pid], owner, self.volumes)
        found.obstacles += _of_pools()
        found.obstacles += _of_orphans(me, processes)
        return found

    def _inspect_sockets(
        self, found: ScanFindings, links: dict[int, list[tuple[int, str]]], me: int, *, pairs: bool
    ) -> None:
        held = {
            int(link[8:-1]): (pid, fd)
            for pid in reversed(links)
            for fd, link in links[pid]
            if link.startswith("socket:[")
        }
        if not held:
            return
        everything = sockets.table()
        for inode, (pid, fd) in held.items():
            owner = "" if pid == me else f" of process {process_name(pid)}"
            one = everything.get(inode)
            where = self.places.get(fd) if pid == me else None
            if one is None:
                found.obstacles += _of_unknown(fd, owner, where) if pid == me else ()
            elif one.kind == "TCP" and one.listening:
                found.listens.append(one.local)
            elif (
                one.connected
                and (pairs or one.kind != "TCP")
                and sockets.is_inside(one, everything, held)
            ):
                found.connections_inside += one.kind == "TCP"
            else:
                found.obstacles += _of_socket(one, fd, owner, where)

    def _of_link(self, pid: int, fd: int, link: str, owner: str) -> Iterator[SnapshotBlocker]:
        if link.startswith("anon_inode:"):
            yield from _of_anonymous(link.removeprefix("anon_inode:").strip("[]"), fd, owner)
        elif link.startswith("/dev/") and not link.startswith(_SHARED_MEMORY):
            yield from _of_device(link, fd, owner)
        elif link.startswith("/") and not link.startswith(_SHARED_MEMORY):
            yield from self._of_file(pid, fd, link, owner)

    def _of_file(self, pid: int, fd: int, link: str, owner: str) -> Iterator[SnapshotBlocker]:
        try:
            status = os.stat(f"/proc/{pid}/fd/{fd}")
            with open(f"/proc/{pid}/fdinfo/{fd}") as f:
                info = f.read()
        except OSError:  # closed meanwhile
            return
        if not stat.S_ISREG(status.st_mode):
            return
        if status.st_nlink == 0 and status.st_size > GHOST_BYTES:
            what = (
                f"deleted file of {status.st_size // 1024**2} MiB, "
                f"{link.removesuffix(' (deleted)')}"
            )
            yield _file(
                what,
                fd,
                owner,
                f"A snapshot cannot contain deleted files of more than "
                f"{GHOST_BYTES // 1024**2} MiB: close it, {_WAY_OUT}",
            )
        flags = re.search(r"^flags:\s*([0-7]+)", info, re.MULTILINE)
        writes = flags is not None and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY
        if writes and status.st_nlink > 0 and not _is_under(link, self.writable):
            advice = (
                f"It is not part of the snapshot, which contains only "
                f"{' and '.join(self.writable)}: close it, {_WAY_OUT}"
            )
            yield _file(f"{link}, open for writing", fd, owner, advice)


def _of_socket(one: Socket, fd: int, owner: str, where: str | None) -> Iterator[SnapshotBlocker]:
    if one.connected:
        what = f"{one.kind} to {one.peer or (not owner and _peer_name(fd)) or 'a process outside'}"
        yield SnapshotBlocker(
            kind="connection",
            fd=fd,
            what=what,
            where=where,
            message=f"enter() left a connection open: descriptor {fd}{owner}, {what}{_at(where)}. "
            f"Close it, {_WAY_OUT}",
        )
    elif one.kind == "UDP":
        what = f"UDP on {one.local}"
        yield _socket(what, fd, owner, where)


def _peer_name(fd: int) -> str:
    """The peer of a descriptor of this process; a peer that has not accepted yet is in no table."""
    try:
        with socket.socket(fileno=os.dup(fd)) as one:
            name = one.getpeername()
    except OSError:  # not connected, or closed meanwhile
        return ""
    return os.fsdecode(name) if isinstance(name, bytes | str) else ""


def _of_unknown(fd: int, owner: str, where: str | None) -> Iterator[SnapshotBlocker]:
    """A socket without address and peer: CRIU supports it in the usual families only."""
    try:
        with socket.socket(fileno=os.dup(fd)) as one:
            family = one.family
    except OSError:  # closed meanwhile
        return
    if family not in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK):
        name = family.name if isinstance(family, socket.AddressFamily) else f"of family {family}"
        yield _socket(f"{name} socket", fd, owner, where)


def _of_anonymous(name: str, fd: int, owner: str) -> Iterator[SnapshotBlocker]:
    if name in _ANONYMOUS:
        return
    kind = "io_uring" if name == "io_uring" else "descriptor"
    advice = f"Turn it off in the library that uses it, close it, {_WAY_OUT}"
    message = (
        f"enter() left a descriptor open that a snapshot cannot contain: descriptor {fd}{owner}, "
        f"{name}. {advice}"
    )
    yield SnapshotBlocker(kind=kind, fd=fd, what=name, where=None, message=message)


def _of_maps(pid: int, owner: str) -> Iterator[SnapshotBlocker]:
    try:
        with open(f"/proc/{pid}/maps") as f:
            text = f.read()
    except OSError:  # it ended
        return
    for path in sorted(set(re.findall(r"(?:/dev/|anon_inode:).*$", text, re.MULTILINE))):
        if path == "anon_inode:[io_uring]":
            message = (
                f"enter() left an io_uring{owner} open, which a snapshot cannot contain. Turn "
                f"it off in the library that uses it, {_WAY_OUT}"
            )
            yield SnapshotBlocker(
                kind="io_uring", fd=None, what="io_uring, mapped", where=None, message=message
            )
        elif path.startswith("/dev/") and not path.startswith(_SHARED_MEMORY):
            yield from _of_device(path, None, owner)


def _of_volumes(
    pid: int, links: Sequence[tuple[int, str]], owner: str, volumes: Sequence[str]
) -> Iterator[SnapshotBlocker]:
    """Files of volumes that are open or mapped: a snapshot contains none of them, and they may be
    others when it is restored."""
    if not volumes:
        return
    advice = f"Files of a volume may change before the snapshot is restored: close it, {_WAY_OUT}"
    for fd, link in links:
        if _is_under(link, volumes):
            yield _file(f"{link}, of a volume", fd, owner, advice)
    try:
        with open(f"/proc/{pid}/maps") as f:
            paths = {row[5].strip() for line in f if len(row := line.split(maxsplit=5)) == 6}
    except OSError:  # it ended
        return
    for path in sorted(path for path in paths if _is_under(path, volumes)):
        what = f"{path}, of a volume, mapped"
        message = f"enter() left {path}{owner} mapped into memory, a file of a volume. {advice}"
        yield SnapshotBlocker(kind="file", fd=None, what=what, where=None, message=message)


def _of_pools() -> Iterator[SnapshotBlocker]:
    for size_bytes, used_bytes in tensor_memory.pools_in_use():
        what = f"memory pool of {size_bytes // 1024**2} MiB"
        advice = (
            "A snapshot would contain the whole pool: load them with mode='mapped' or to a GPU, "
            "or in @enter(snap=False)"
        )
        message = f"enter() left {used_bytes // 1024**2} MiB of tensors in a {what}. {advice}"
        yield SnapshotBlocker(kind="memory", fd=None, what=what, where=None, message=message)


def _of_orphans(me: int, tree: Collection[int]) -> Iterator[SnapshotBlocker]:
    """Processes that detached themselves from our tree; checked in a slot only, where init is our
    parent."""
    if os.getppid() != 1:
        return
    for pid, parent, state in all_processes():
        if parent == 1 and pid not in (1, me) and pid not in tree and state != "Z":
            name = process_name(pid)
            advice = "Start it as a child, or in @enter(snap=False)"
            message = (
                f"process {name} detached itself from the function's process and would not be part "
                f"of a snapshot. {advice}"
            )
            yield SnapshotBlocker(kind="process", fd=None, what=name, where=None, message=message)


def _of_device(path: str, fd: int | None, owner: str) -> Iterator[SnapshotBlocker]:
    if path in _HARMLESS or path.startswith(_GPU):
        return
    held = "mapped" if fd is None else f"descriptor {fd}"
    message = f"enter() left a device open: {held}{owner}, {path}. Close it, {_WAY_OUT}"
    yield SnapshotBlocker(kind="device", fd=fd, what=path, where=None, message=message)


def _file(what: str, fd: int, owner: str, advice: str) -> SnapshotBlocker:
    return SnapshotBlocker(
        kind="file",
        fd=fd,
        what=what,
        where=None,
        message=f"enter() left a file open: descriptor {fd}{owner}, {what}. {advice}",
    )


def _socket(what: str, fd: int, owner: str, where: str | None) -> SnapshotBlocker:
    message = (
        f"enter() left a socket open: descriptor {fd}{owner}, {what}{_at(where)}. Close it, "
        f"{_WAY_OUT}"
    )
    return SnapshotBlocker(kind="socket", fd=fd, what=what, where=where, message=message)


def _at(where: str | None) -> str:
    return f" ({where})" if where else ""


def _is_under(path: str, directories: Sequence[str]) -> bool:
    return any(path == d or path.startswith(d.rstrip("/") + "/") for d in directories)
