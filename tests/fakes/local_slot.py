"""A slot for tests of what drives CRIU: runs the order as a subprocess, without namespaces, uids or
groups."""

from __future__ import annotations

import asyncio
import os
import socket as sockets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from snapshotter.criu.fd_numbers import FIRST_FD, SOCKET_FD

_EXEC = """
import fcntl, os, sys
fds = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 200) for fd in sys.argv[1].split(",")]
numbers = [int(n) for n in sys.argv[2].split(",")]
for fd, number in zip(fds, numbers):
    os.dup2(fd, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


@dataclass(eq=False, kw_only=True)
class LocalRun:
    """One process."""

    socket: sockets.socket | None
    pidfd: int
    exited: asyncio.Future[int | None]
    process: subprocess.Popen[bytes]
    stdio_fds: Sequence[int] = field(default=())

    def kill(self) -> None:
        self.process.kill()


class LocalSlot:
    """Implements `snapshotter.criu.processes.CriuSlot`. `runs`: every process that was started, in
    order."""

    def __init__(self) -> None:
        self.runs: list[LocalRun] = []

    async def serve_pages(
        self, run: str, *, cgroup: Mapping[str, Any], fds: list[int], record: bool
    ) -> LocalRun:
        """It has no processes whose memory could come later."""
        for fd in fds:
            os.close(fd)
        raise OSError("a local slot restores no memory")

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
    ) -> LocalRun:
        ours, theirs = sockets.socketpair(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
        given = {
            **({SOCKET_FD: theirs.fileno()} if socket else {}),
            **{FIRST_FD + i: fd for i, fd in enumerate(fds)},
        }
        sources, numbers = (",".join(map(str, part)) for part in (given.values(), given))
        process = await asyncio.to_thread(
            subprocess.Popen,
            [sys.executable, "-I", "-S", "-c", _EXEC, sources, numbers, *argv],
            pass_fds=list(given.values()),
        )
        theirs.close()
        for fd in fds:
            os.close(fd)
        if not socket:
            ours.close()
        loop = asyncio.get_running_loop()
        exited: asyncio.Future[int | None] = loop.create_future()
        pidfd = os.pidfd_open(process.pid)
        watch = os.dup(pidfd)

        def gone() -> None:
            loop.remove_reader(watch)
            os.close(watch)
            code = process.wait()
            exited.set_result(-code if code < 0 else code << 8)

        loop.add_reader(watch, gone)
        self.runs.append(
            LocalRun(socket=ours if socket else None, pidfd=pidfd, exited=exited, process=process)
        )
        return self.runs[-1]
