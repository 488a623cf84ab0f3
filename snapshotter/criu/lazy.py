"""The page server of a lazily restored process: it brings the working set ahead, other memory on
access, and the rest in the background."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from snapshotter.criu import processes
from snapshotter.criu.processes import CriuRun, CriuSlot

_MEMORY_FILE = "working-set"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """How memory comes lazily: `working_set`: ranges that are brought first
    (`page_files.WORKING_SET_RANGE`); `record`: write down instead what is accessed."""

    working_set: bytes = b""
    record: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyPages:
    """The server of a lazily restored process: while it runs, pages are missing. `kill` it only
    together with the process.

    Attributes:
        brought: completes once the working set is there, or the server has exited.
    """

    run: CriuRun
    brought: asyncio.Future[None]

    @property
    def exited(self) -> asyncio.Future[int | None]:
        """Its wait status. It exits when all memory is there, or the process has exited."""
        return self.run.exited

    async def kill(self) -> None:
        """Kill it, wait, and close its descriptors; if it has exited, only close them."""
        await processes.end(self.run)


async def serve_pages(
    slot: CriuSlot, pages: PageRequest, *, images: int, work: int, cgroup: Mapping[str, Any]
) -> LazyPages:
    """Start the page server; it listens when this returns. Raises OSError, and errors of the
    slot."""
    file = os.memfd_create(_MEMORY_FILE, os.MFD_CLOEXEC)
    with os.fdopen(file, "wb", buffering=0) as memory:
        memory.write(pages.working_set)
        fds = processes.duplicates(images, work, file)
    try:
        ours, theirs = os.pipe2(os.O_CLOEXEC)
    except OSError:
        for fd in fds:
            os.close(fd)
        raise
    brought = _closed(ours)
    run = await slot.serve_pages(
        processes.new_name("pages"), cgroup=cgroup, fds=[*fds, theirs], record=pages.record
    )
    return LazyPages(run=run, brought=brought)


def _closed(fd: int) -> asyncio.Future[None]:
    """Completes when the other end of this pipe is closed. Takes ownership."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def end() -> None:
        loop.remove_reader(fd)
        os.close(fd)
        if not done.done():
            done.set_result(None)

    loop.add_reader(fd, end)
    return done
