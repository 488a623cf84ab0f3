"""Into a pod: a cell (`snapshotter.criu.self_test_sandbox`) whose namespaces are those of a pod
that waits. Experimental.

The pod is never privileged: the node agent, which is root on its node, enters from outside. What it
brings along: the mounts that a slot has, the pod's own cgroup, and a CRIU of its own, for a pod's
image has none."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapshotter.criu.bundle import CriuBundle
from snapshotter.criu.errors import CriuUnavailable
from snapshotter.criu.self_test_sandbox import Sandbox, SandboxProcess
from snapshotter.errors import Unsupported
from snapshotter.linux import proc as processes
from snapshotter.shim import child, seqpacket

_ROOT = str(Path(__file__).resolve().parents[2])
_BOOT = (
    "import sys; sys.path.insert(0, {root!r}); from snapshotter.pods.entry_init import main; "
    "main({fd})"
)
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class Brought:
    """What is brought into a pod.

    Attributes:
        binds: (path here, name below the slot's root), as a slot has them.
        uid: the worker's.
        writable_bytes: of its temporary file systems.
        files: the snapshot's archive of files.
        kdat: what CRIU found out about this kernel; None: it looks for itself.
    """

    binds: Sequence[tuple[str, str]]
    uid: int
    writable_bytes: int
    files: Path
    kdat: Path | None


class Entry(Sandbox):
    """Inside of a pod. Owner: the event loop."""

    async def criu(
        self,
        run: str,
        argv: list[str],
        *,
        uid: int,
        cgroup: Mapping[str, Any],
        fds: list[int],
        socket: bool = True,
        stdio: bool = False,
    ) -> SandboxProcess:
        """As a cell does it, with the CRIU that was brought along."""
        return await super().criu(
            run,
            [*child.CRIU_KIT, *argv[1:]],
            uid=uid,
            cgroup=cgroup,
            fds=fds,
            socket=socket,
            stdio=stdio,
        )

    async def revive(self, pid: int) -> SandboxProcess:
        """Connect to a restored worker: its control channel and pidfd are the caller's. Raises
        CriuUnavailable."""
        return await self._order({"op": "revive", "pid": pid})

    async def keep(self) -> None:
        """From now on it lives without us."""
        await self._order({"op": "keep"})


@contextlib.asynccontextmanager
async def entered(pod: int, brought: Brought, kit: CriuBundle) -> AsyncIterator[Entry]:
    """Inside of the pod of the process behind pidfd `pod`, which stays the caller's; what was
    restored and not kept is gone at the end.

    Raises CriuUnavailable, Unsupported, OSError.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            argv = [
                sys.executable,
                "-I",
                "-S",
                "-B",
                "-c",
                _BOOT.format(root=_ROOT, fd=theirs.fileno()),
            ]
            process = await asyncio.to_thread(
                subprocess.Popen,
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        found = Entry(ours, process)
        try:
            _send_in(ours, pod, brought, kit)
            await found.wait_ready()
            yield found
        finally:
            await found.aclose()


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
            "groups": groups_of(processes.host_pid(pod)),
        }
        seqpacket.send(connection, seqpacket.encode(order), fds)
    except FileNotFoundError as e:
        raise CriuUnavailable("the pod is gone, or the snapshot's files are") from e
    finally:
        seqpacket.close_all(fds)


def groups_of(pid: int, *, root: Path = _CGROUPS, proc: Path = Path("/proc")) -> list[str]:
    """The `cgroup.procs` files of a process's groups, in every hierarchy that is mounted here.

    Raises Unsupported when none can be seen: without the pod's limits nothing may run; OSError when
    the process is gone."""
    found = []
    for line in (proc / str(pid) / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        hierarchy = root / controllers.removeprefix("name=") if controllers else root
        file = hierarchy / path.lstrip("/") / "cgroup.procs"
        # those of another cgroup namespace begin with it
        if ".." not in file.parts and file.exists():
            found.append(str(file))
    if not found:
        raise Unsupported(
            f"the pod's cgroup is not visible below {root}: give the node agent the node's own "
            f"cgroup namespace (privileged)"
        )
    return found
