"""Starts processes that enter pods (`entry.server`), each with a socket to its owner, and mounts
directories in pods by them."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import subprocess
import sys
from pathlib import Path

from snapshotter.linux.proc import wait_readable
from snapshotter.shim import seqpacket

ANSWER_S = 10.0
"""Limit of one fork."""
NODE_DIRECTORY = Path("/pilotlight")
"""Where pods see their directory of the node (`pilotlight.kubernetes.manifests.pod`)."""
MOUNT_S = 10.0
"""Limit of one mount, which takes milliseconds."""
_ROOT = str(Path(__file__).resolve().parents[3])
_BOOT = (
    "import sys; sys.path.insert(0, {root!r}); from snapshotter.pods.entry.server import main; "
    "main({fd})"
)


class EntryProcess:
    """A process that enters a pod. Owner: the caller."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd

    def __repr__(self) -> str:
        return f"<EntryProcess {self.pid}>"

    def wait(self) -> int:
        """Wait until it has exited. Blocking; once."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.poll()
        os.close(self._pidfd)
        return 0


class EntryProcesses:
    """The server and its connection. Owner: the event loop. A server that has exited is started
    again."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._control: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"<EntryProcesses {'of ' + str(self._server.pid) if self._server else 'not begun'}>"

    async def start(self, kind: str, control: socket.socket) -> EntryProcess:
        """Start a process of this kind, which serves `control`; the caller keeps its own copy.
        Raises OSError."""
        async with self._turn:
            for is_last in (False, True):
                try:
                    return await self._request(kind, control)
                except BaseException as e:
                    await self._end()
                    if is_last or not isinstance(e, OSError):
                        raise
        raise AssertionError("the last attempt returns or raises")

    async def begin(self) -> None:
        """Start the server before it is needed. Raises OSError."""
        if self._server is None:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._control.setblocking(False)
            with theirs:
                code = _BOOT.format(root=_ROOT, fd=theirs.fileno())
                self._server = await asyncio.to_thread(
                    subprocess.Popen,
                    [sys.executable, "-I", "-S", "-B", "-c", code],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )

    async def aclose(self) -> None:
        """End the server. Processes that it started go on."""
        async with self._turn:
            await self._end()

    async def _request(self, kind: str, control: socket.socket) -> EntryProcess:
        await self.begin()
        assert self._control is not None
        seqpacket.send(self._control, seqpacket.encode({"kind": kind}), [control.fileno()])
        async with asyncio.timeout(ANSWER_S):
            await wait_readable(self._control.fileno())
        message, fds = seqpacket.receive(self._control)
        if message is None or not fds:
            raise OSError(str((message or {}).get("error", "the server has exited")))
        return EntryProcess(int(message["pid"]), fds[0])

    async def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._server is not None:
            self._server.kill()
            await asyncio.to_thread(self._server.wait)
        self._control = self._server = None


class PodMounts:
    """Mounts directories of this node in pods. Immutable."""

    def __init__(self, processes: EntryProcesses, *, target: Path = NODE_DIRECTORY) -> None:
        self._processes = processes
        self._target = target

    async def show(self, pidfd: int, warm: Path, tenant: Path) -> None:
        """Mount the directory `tenant` read-only over `warm`, which the pod of the process `pidfd`
        sees at the target. No effect if it is there. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                process = await self._processes.start("show", theirs)
            try:
                order = {"source": str(tenant), "over": str(warm), "target": str(self._target)}
                seqpacket.send(ours, seqpacket.encode(order), [pidfd])
                ours.setblocking(False)
                async with asyncio.timeout(MOUNT_S):
                    answer = await asyncio.get_running_loop().sock_recv(ours, 65536)
            finally:
                ours.close()
                await asyncio.to_thread(process.wait)
        if answer != b"ok":
            why = answer.decode(errors="replace") or "the process that mounts it has exited"
            raise OSError(f"the tenant's directory cannot be mounted in the pod: {why}")
