"""Enters a pod: a sandbox (`snapshotter.criu.self_test_sandbox`) in the namespaces of a waiting
pod.

The pod is never privileged: the node agent, which is root on its node, enters from outside. It
provides the mounts that a slot has, uses the pod's own cgroup, and provides CRIU, which a pod's
image does not contain.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapshotter.criu.bundle import CriuBundle
from snapshotter.criu.errors import CriuUnavailable
from snapshotter.criu.self_test_sandbox import Sandbox, SandboxProcess, started
from snapshotter.errors import Unsupported
from snapshotter.linux.proc import host_pid
from snapshotter.pods.entry.processes import EntryProcesses
from snapshotter.shim import child, seqpacket

_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class Brought:
    """What the agent provides in a pod.

    Attributes:
        binds: (path here, name below the slot's root), as in a slot.
        uid: the worker's.
        writable_bytes: size of its temporary file systems.
        python: its interpreter in the tree.
        files: the snapshot's archive of files; /dev/null: none.
        kdat: CRIU's cache of kernel features; None: it tests the kernel again.
        address: of the worker's slot, which the pod gets on its loopback interface; "": none.
        restores: a worker is restored: it gets a mount namespace of its own, in which it finds the
            node's programs and libraries, which it had in its slot, instead of the image's. False:
            the tree becomes the pod's.
        rootfs: root file system of the function's own image, which the worker gets instead, in a
            mount namespace of its own; None: it has none.
        kept: directories of the pod that it finds there.
        driver: whether it finds the libraries of the machine's GPU driver there.
        stdio: stdout and stderr of a worker that is booted; owned by the caller.
    """

    binds: Sequence[tuple[str, str]]
    uid: int
    writable_bytes: int
    python: str
    files: Path = Path(os.devnull)
    kdat: Path | None = None
    address: str = ""
    restores: bool = True
    rootfs: Path | None = None
    kept: Sequence[str] = ()
    driver: bool = False
    stdio: Sequence[int] = ()


class Entry(Sandbox):
    """A sandbox inside a pod. Owner: the event loop."""

    async def criu(self, run: str, argv: list[str], **options: Any) -> SandboxProcess:
        """Run CRIU as the base class does, from the bundle that the agent provides."""
        return await super().criu(run, [*child.CRIU_KIT, *argv[1:]], **options)

    async def boot(self, command: Mapping[str, Any]) -> SandboxProcess:
        """Execute a worker; the caller owns its control channel and pidfd. `command`: `argv`,
        `env`, `work`, `uid` and `limits` of a slot's boot order. Raises CriuUnavailable."""
        return await self._order({"op": "boot", **command})

    async def attach(self, pid: int) -> SandboxProcess:
        """Connect to a restored worker; the caller owns its control channel and pidfd. Raises
        CriuUnavailable."""
        return await self._order({"op": "revive", "pid": pid})

    async def keep(self) -> None:
        """Keep the restored worker when this sandbox is closed."""
        await self._order({"op": "keep"})


@contextlib.asynccontextmanager
async def entered(
    processes: EntryProcesses, pod: int, brought: Brought, kit: CriuBundle
) -> AsyncIterator[Entry]:
    """Enter the pod of the process of pidfd `pod`, which the caller keeps. A restored worker that
    is not kept is killed at the end.

    Raises CriuUnavailable, Unsupported, OSError.
    """
    boot = functools.partial(processes.start, "enter")
    async with started(Entry, boot) as (found, connection):
        _send_in(connection, pod, brought, kit)
        if brought.rootfs is not None:  # its programs are a tenant's
            found.criu_env = child.CRIU_KIT_VARIABLES
        await found.wait_ready()
        yield found


def _send_in(connection: socket.socket, pod: int, brought: Brought, kit: CriuBundle) -> None:
    fds: list[int] = []
    try:
        fds.append(os.dup(pod))
        fds.append(os.open(brought.kdat or os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        fds.append(os.open(brought.files, os.O_RDONLY | os.O_CLOEXEC))
        order = {
            "op": "enter",
            "binds": [*brought.binds, (str(kit.directory), kit.NAME)],
            "uid": brought.uid,
            "writable_bytes": brought.writable_bytes,
            "python": brought.python,
            "groups": groups_of(host_pid(pod)),
            "address": brought.address,
            "restores": brought.restores,
            "rootfs": "" if brought.rootfs is None else str(brought.rootfs),
            "kept": list(brought.kept),
            "driver": brought.driver,
        }
        fds += [os.dup(fd) for fd in brought.stdio]
        seqpacket.send(connection, seqpacket.encode(order), fds)
    except FileNotFoundError as e:
        raise CriuUnavailable("the pod, or the snapshot's files, no longer exist") from e
    finally:
        seqpacket.close_all(fds)


def groups_of(pid: int, *, root: Path = _CGROUPS, proc: Path = Path("/proc")) -> list[str]:
    """The `cgroup.procs` files of a process's groups, in every hierarchy that is mounted here.

    Raises Unsupported when none is visible: nothing may run without the pod's limits; OSError when
    the process has exited.
    """
    found = []
    for line in (proc / str(pid) / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        hierarchy = root / controllers.removeprefix("name=") if controllers else root
        file = hierarchy / path.lstrip("/") / "cgroup.procs"
        # paths outside our cgroup namespace begin with ".."
        if ".." not in file.parts and file.exists():
            found.append(str(file))
    if not found:
        raise Unsupported(
            f"the pod's cgroup is not visible below {root}: give the node agent the node's own "
            f"cgroup namespace (privileged)"
        )
    return found
