"""CRIU processes in a slot: start, descriptor numbers, end, and logs.

Directories are passed as descriptors: 20 is the images, 21 the work directory. CRIU opens them
through its own /proc/self/fd, because a descriptor number in an RPC field refers to the process
that created the socket pair, which is the shim."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from snapshotter.criu.fd_numbers import FIRST_FD
from snapshotter.criu.messages import Messages

IMAGES, WORK = f"/proc/self/fd/{FIRST_FD}", f"/proc/self/fd/{FIRST_FD + 1}"
PRINTED = "criu.err"
"""File in the work directory with CRIU's output: before it has read the request it has no log."""
_LOG_BYTES = 256 * 1024
"""How much of a log is read, from its end."""
_DEATH_S = 5.0
"""Timeout for a killed CRIU to exit: it may be freeing gigabytes."""

_numbers = itertools.count(1)


def new_name(operation: str) -> str:
    """A name for a run, unique in this process."""
    return f"{operation}-{next(_numbers)}"


class CriuRun(Protocol):
    """One CRIU process in a slot, started by the shim.

    Attributes:
        socket: our end of its RPC socket; None if started without one.
        stdio_fds: numbers of stdout and stderr in CRIU, for `inherit_fd`; () if not requested.
        exited: its wait status once it exited; None if unknown.
    """

    @property
    def socket(self) -> socket.socket | None: ...

    @property
    def pidfd(self) -> int: ...

    @property
    def stdio_fds(self) -> Sequence[int]: ...

    @property
    def exited(self) -> asyncio.Future[int | None]: ...

    def kill(self) -> None:
        """Send SIGKILL; no error if it has exited."""


class CriuSlot(Protocol):
    """A place to run CRIU (`snapshotter.slots.slot.Slot`)."""

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
    ) -> CriuRun:
        """Start it with `fds` at 20, 21, …, taking ownership of them. The caller closes its socket
        and pidfd. Raises SlotConnectionLost."""

    async def serve_pages(
        self, run: str, *, cgroup: Mapping[str, Any], fds: list[int], record: bool
    ) -> CriuRun:
        """Start a page server (`snapshotter.shim.pages.page_server`) with `fds`: images, work
        directory, working set, and the end of a pipe that it closes once the working set is there;
        takes ownership of them. It listens then. The caller closes its pidfd. Raises
        SlotConnectionLost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Criu:
    """The CRIU to use: its binary, as visible inside a slot, and its messages."""

    binary: Path
    messages: Messages


async def end(run: CriuRun) -> None:
    """Close the socket, wait for CRIU's exit or kill it, and close our descriptors. CRIU's status
    after its answer is meaningless."""
    if run.socket is not None:
        run.socket.close()  # CRIU exits when it sees that
    try:
        if not run.exited.done():
            run.kill()
            await asyncio.wait([run.exited], timeout=_DEATH_S)
    finally:
        if run.pidfd >= 0:
            os.close(run.pidfd)


def duplicates(*fds: int) -> list[int]:
    """Duplicates, to transfer to another process."""
    copies: list[int] = []
    try:
        copies.extend(map(os.dup, fds))
    except OSError:
        for fd in copies:
            os.close(fd)
        raise
    return copies


def forget(work: int, *names: str) -> None:
    """Remove files of an earlier operation from the work directory, so that its logs are not
    mistaken for the current ones."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=work)


def read_log(work: int, name: str) -> bytes:
    """The end of a log in the work directory; b"" if there is none."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=work)
    except OSError:
        return b""
    with os.fdopen(fd, "rb") as f:
        size = f.seek(0, os.SEEK_END)
        f.seek(max(0, size - _LOG_BYTES))
        return f.read()


def said(work: int, name: str) -> bytes:
    """The end of a log, or if there is none of CRIU's output: an unreadable request fails before
    the log exists."""
    return read_log(work, name) or read_log(work, PRINTED)
