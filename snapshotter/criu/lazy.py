"""The page daemon of a lazily restored process: it serves memory on access, and the rest in the
background."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from snapshotter.criu import logs, processes
from snapshotter.criu.errors import CriuError, CriuExited, CriuTimeout
from snapshotter.criu.fd_numbers import FIRST_FD
from snapshotter.criu.processes import Criu, CriuRun, CriuSlot
from snapshotter.linux import proc

_READY_FD = FIRST_FD + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyPages:
    """The daemon that serves memory to a lazily restored process: while it runs, pages are missing.
    `kill` it only together with the process."""

    run: CriuRun

    @property
    def exited(self) -> asyncio.Future[int | None]:
        """Its wait status. It exits when all memory is transferred, or the process has exited."""
        return self.run.exited

    async def kill(self) -> None:
        """Kill it, wait, and close its descriptors; if it has exited, only close them."""
        await processes.end(self.run)


async def serve_pages(
    slot: CriuSlot,
    criu: Criu,
    *,
    images: int,
    work: int,
    uid: int,
    cgroup: Mapping[str, Any],
    deadline_s: float,
) -> LazyPages:
    """Start the page daemon and wait until it listens. It then writes one byte to a pipe, which
    closes when it dies."""
    processes.forget(work, "lazy.log", "lazy-pages.socket")
    argv = [
        str(criu.binary),
        "lazy-pages",
        "--no-default-config",
        "--images-dir",
        processes.IMAGES,
        "--work-dir",
        processes.WORK,
    ]
    argv += ["--log-file", "lazy.log", "-v2", "--status-fd", str(_READY_FD)]
    readable, writable = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(readable, "rb", buffering=0) as pipe:
        fds = [*processes.duplicates(images, work), writable]
        run = await slot.criu(
            processes.new_name("lazy"), argv, uid=uid, cgroup=cgroup, fds=fds, socket=False
        )
        try:
            async with asyncio.timeout(deadline_s):
                await proc.wait_readable(pipe.fileno())
            if not pipe.read(1):
                words = logs.cause_of(processes.read_log(work, "lazy.log")).message
                raise CriuExited(
                    "lazy-pages",
                    f"it ended before it was ready: {words}",
                    log_tail=logs.tail(processes.read_log(work, "lazy.log")),
                )
        except TimeoutError:
            await processes.end(run)
            raise CriuTimeout(
                "lazy-pages", deadline_s, log_tail=logs.tail(processes.read_log(work, "lazy.log"))
            ) from None
        except (CriuError, asyncio.CancelledError):
            await processes.end(run)
            raise
    return LazyPages(run=run)
