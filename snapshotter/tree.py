"""Namespaces of a slot, and the tree at `/run/pilotlight/slot` that every worker finds at the same paths on every node.

Read-only binds (interpreter, packages, code, weights), one writable tmpfs (work directory, /tmp and the like), a `/proc` and a
`/dev/shm` of its own. Runs in the shim, as root. Sources: mount(2), unshare(2), mount_namespaces(7).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Container, Sequence

ROOT = "/run/pilotlight/slot"
FIRST_PID = 1000
"""In-slot pids start above it: pids of a restored image then never collide with the shim or with one another."""

_SHARED = ("/tmp", "/var/tmp", "/run/lock")
"""Directories of the host that anybody may write: a slot has its own, or tenants would meet there and fill the host's disk."""

_NEWNS, _NEWUTS, _NEWIPC, _NEWPID = 0x00020000, 0x04000000, 0x08000000, 0x20000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


def unshare() -> None:
    """New mount, UTS and IPC namespaces for this process, and a PID namespace for its next child. Raises OSError."""
    if _libc.unshare(_NEWNS | _NEWUTS | _NEWIPC | _NEWPID) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"unshare: {os.strerror(code)}")
    mount(None, "/", None, _REC | _PRIVATE)


def enter_as_init() -> None:
    """First steps of PID 1: its own /proc, a neutral host name, room below the first worker's pid. Raises OSError."""
    mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    socket.sethostname("pilotlight")
    with open("/proc/sys/kernel/ns_last_pid", "w") as f:
        f.write(str(FIRST_PID))


def others(known: Container[int]) -> list[str]:
    """Names of the living processes of this PID namespace but those in `known`."""
    names = []
    for pid in [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]:
        with contextlib.suppress(OSError):  # it ended while we looked
            with open(f"/proc/{pid}/stat") as f:
                name, _, rest = f.read().partition("(")[2].rpartition(")")
            if pid not in known and rest.split()[0] not in "ZX":
                names.append(name)
    return names


def build(binds: Sequence[tuple[str, str]], *, uid: int, writable_bytes: int) -> None:
    """Mount the tree. `binds`: (host path, path below ROOT). Everything on the host's /tmp is out of sight afterwards. Raises OSError."""
    os.makedirs(ROOT, exist_ok=True)
    mount("tmpfs", ROOT, "tmpfs", _NOSUID | _NODEV, f"size={writable_bytes},mode=755")
    for source, name in binds:
        _bind(source, f"{ROOT}/{name}")
    for name, mode in (("work", 0o700), ("tmp", 0o1777)):
        os.mkdir(f"{ROOT}/{name}")
        os.chmod(f"{ROOT}/{name}", mode)
    os.chown(f"{ROOT}/work", uid, uid)
    mount("tmpfs", "/dev/shm", "tmpfs", _NOSUID | _NODEV, f"size={writable_bytes},mode=1777")
    for shared in _SHARED:
        if os.path.isdir(shared):
            mount(f"{ROOT}/tmp", shared, None, _BIND)


def _bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o444))
    mount(source, target, None, _BIND)
    mount(None, target, None, _BIND | _REMOUNT | _RDONLY | _NOSUID | _NODEV)


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """mount(2). Raises OSError that names source and target."""
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    if _libc.mount(*words[:3], ctypes.c_ulong(flags), words[3]) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mount {source} on {target}: {os.strerror(code)}")
