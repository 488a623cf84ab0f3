"""CRIU processes in a slot: how one is started, what its descriptors are called, how it ends, what
it logged.

Directories travel as descriptors: 20 is the images, 21 the work directory; CRIU opens them through
its own /proc/self/fd, because an RPC field with a descriptor's number means one of the process that
made the socket pair, which here is the shim."""

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

from snapshotter.criu.descriptors import FIRST_FD
from snapshotter.criu.messages import Messages

IMAGES, WORK = f"/proc/self/fd/{FIRST_FD}", f"/proc/self/fd/{FIRST_FD + 1}"
PRINTED = "criu.err"
"""In the work directory, what CRIU prints: before it has read the request it has no log yet."""
_LOG_BYTES = 256 * 1024
"""How much of a log is looked at, from its end."""
_DEATH_S = 5.0
"""How long a killed CRIU may take to be gone: it may be freeing gigabytes."""

_numbers = itertools.count(1)


def new_name(operation: str) -> str:
    """A name for a run, unique in this process."""
    return f"{operation}-{next(_numbers)}"


class CriuRun(Protocol):
    """One CRIU process in a slot, as the shim started it.

    Attributes:
        socket: our end of its RPC socket; None when it was started without one. stdio_fds: numbers
        that stdout and stderr have in CRIU, for `inherit_fd`; () when none were asked for. exited:
        its wait status once it ended; None when nobody could tell.
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
        """SIGKILL it; one that is gone is no error."""


class CriuSlot(Protocol):
    """Where CRIU can be run (`snapshotter.slots.slot.Slot`)."""

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
        """Start it with `fds` at 20, 21, …, which it takes over. The caller closes its socket and
        pidfd. Raises SlotConnectionLost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Criu:
    """The CRIU to use: its binary, as seen from inside a slot, and its messages."""

    binary: Path
    messages: Messages


async def end(run: CriuRun) -> None:
    """Wait for an end that is near, bring about one that is not, and close what is ours. CRIU's
    status after its answer tells nothing."""
    if run.socket is not None:
        run.socket.close()  # it exits on its own when it sees that
    try:
        if not run.exited.done():
            run.kill()
            await asyncio.wait([run.exited], timeout=_DEATH_S)
    finally:
        if run.pidfd >= 0:
            os.close(run.pidfd)


def duplicates(*fds: int) -> list[int]:
    """Copies to give away."""
    copies: list[int] = []
    try:
        copies.extend(map(os.dup, fds))
    except OSError:
        for fd in copies:
            os.close(fd)
        raise
    return copies


def forget(work: int, *names: str) -> None:
    """Remove files that an earlier operation left in the work directory, so that its words are not
    taken for ours."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=work)


def read_log(work: int, name: str) -> bytes:
    """The end of a log in the work directory; b"" when there is none."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=work)
    except OSError:
        return b""
    with os.fdopen(fd, "rb") as f:
        size = f.seek(0, os.SEEK_END)
        f.seek(max(0, size - _LOG_BYTES))
        return f.read()


def said(work: int, name: str) -> bytes:
    """The end of a log; where there is none, of what was printed: a request that cannot be read
    comes before the log."""
    return read_log(work, name) or read_log(work, PRINTED)


async def wait_readable(fd: int) -> None:
    """Return when there is something to read, or the end."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, ready.cancel)
    try:
        await asyncio.wait([ready])
    finally:
        loop.remove_reader(fd)
