"""Dump and restore of a process in a slot: one call uses one `criu swrk` process (and, for lazy
memory, one page server).

CRIU runs inside the slot, as a child of its shim: it has the same view as the worker, and a
restored root process becomes the shim's child (`rst_sibling`). Logs and statistics go to the work
directory, so that published images stay unchanged."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pilotlight.core.background_tasks import cancel_all
from snapshotter.criu import processes
from snapshotter.criu.errors import CriuExited
from snapshotter.criu.fd_numbers import SOCKET_FD
from snapshotter.criu.lazy import LazyPages, PageRequest, serve_pages
from snapshotter.criu.processes import Criu, CriuRun, CriuSlot
from snapshotter.criu.swrk import Notify, Swrk

GHOST_LIMIT_BYTES = 64 * 1024**2
"""Largest deleted but still open file that is included in the image. CRIU's own limit is 1 MiB."""
_LOG_LEVEL = 2
"""Errors and warnings, which show the cause. Level 4 costs tens of milliseconds of writing."""
_CPU_CAP_FPU, _CPU_CAP_INS, _CPU_CAP_IMAGE = 1, 4, 8
_CPU_CAP = _CPU_CAP_FPU | _CPU_CAP_INS | _CPU_CAP_IMAGE
"""Record the CPU's features in the image, and reject a less capable CPU before anything runs
(include/cpu.h of CRIU)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A running restored process. `pid` in its slot's namespace. `lazy`: the page server, to be
    killed by the caller."""

    pid: int
    lazy: LazyPages | None = None


async def dump(
    slot: CriuSlot,
    *,
    criu: Criu,
    pid: int,
    images: int,
    work: int,
    uid: int,
    cgroup: Mapping[str, Any],
    tcp: bool = False,
    deadline_s: float,
    on_notify: Notify | None = None,
) -> None:
    """Dump process `pid` of the slot and its tree to images. On success it has exited; after an
    error the caller must kill the rest.

    `images`, `work`: directory descriptors, owned by the caller. `uid`: of the worker. `tcp`: keep
    TCP connections with both ends in the tree. Raises CriuFailed, CriuTimeout, CriuExited, and
    errors of the slot."""
    options = {**_common(deadline_s, tcp=tcp), "pid": pid, "log_file": "dump.log"}
    async with _criu(
        slot, "dump", criu, images=images, work=work, uid=uid, cgroup=cgroup, log="dump.log"
    ) as (_, swrk):
        await swrk.request("DUMP", options, deadline_s=deadline_s, on_notify=on_notify)


async def restore(
    slot: CriuSlot,
    *,
    criu: Criu,
    images: int,
    work: int,
    uid: int,
    cgroup: Mapping[str, Any],
    stdio_keys: Mapping[str, str] | None = None,
    lazy: PageRequest | None = None,
    tcp: bool = False,
    deadline_s: float,
    on_notify: Notify | None = None,
    prepare: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> Restored:
    """Restore the images as a child of the slot's shim.

    `stdio_keys`: the `stdout` and `stderr` of the dumped process (`pipe:[inode]`), to connect them
    to the slot's log pipes; None if the process had neither. `lazy`: memory comes while the process
    runs, which needs maps of the images (`page_map`). `prepare`: orders the slot to do what must be
    complete before CRIU starts; no answer is awaited before the next order. After an error the
    caller must end the slot: a partial tree may be left in it.

    Raises CriuFailed, CriuTimeout, CriuExited, errors of the slot, and what `prepare` raises.
    """
    options = {
        **_common(deadline_s, tcp=tcp),
        "rst_sibling": True,
        "log_file": "restore.log",
        "lazy_pages": lazy is not None,
        "notify_scripts": on_notify is not None,  # CRIU waits for an answer to each
    }
    preparing = asyncio.create_task(prepare(), name="prepare a restore") if prepare else None
    serving = (
        asyncio.create_task(
            serve_pages(slot, lazy, images=images, work=work, cgroup=cgroup), name="page server"
        )
        if lazy is not None
        else None
    )
    try:
        await asyncio.sleep(0)  # their orders are sent before that for CRIU
        async with _criu(
            slot,
            "restore",
            criu,
            images=images,
            work=work,
            uid=uid,
            cgroup=cgroup,
            log="restore.log",
            stdio=stdio_keys is not None,
        ) as (run, swrk):
            server = await serving if serving is not None else None
            if preparing is not None:
                await preparing
            options["inherit_fd"] = _inherited(stdio_keys or {}, run.stdio_fds)
            answer = await swrk.request(
                "RESTORE", options, deadline_s=deadline_s, on_notify=on_notify
            )
        if not answer.pid:
            raise CriuExited("restore", "its answer has no pid")
    except BaseException:
        await cancel_all([preparing] if preparing is not None else [])
        if serving is not None:
            await asyncio.wait([serving])  # the shim answers at once, or is lost
            if serving.exception() is None:
                await serving.result().kill()
        raise
    return Restored(pid=answer.pid, lazy=server)


def _common(deadline_s: float, *, tcp: bool) -> dict[str, Any]:
    return {
        "images_dir_fd": -1,  # required by the RPC; the path below takes precedence
        "images_dir": processes.IMAGES,
        "log_level": _LOG_LEVEL,
        "notify_scripts": True,
        "link_remap": True,
        "file_locks": True,
        "ghost_limit": GHOST_LIMIT_BYTES,
        "manage_cgroups_mode": "IGNORE",
        "network_lock": "SKIP",
        "tcp_established": tcp,
        "cpu_cap": _CPU_CAP,
        "timeout": max(1, math.ceil(deadline_s)),
    }


def _inherited(keys: Mapping[str, str], fds: Sequence[int]) -> list[dict[str, Any]]:
    """Pairs for `inherit_fd`; if stdout and stderr were one pipe, stdout's serves both."""
    pairs: dict[str, int] = {}
    for name, fd in zip(("stdout", "stderr"), fds, strict=False):
        if name in keys:
            pairs.setdefault(keys[name], fd)
    return [{"key": key, "fd": fd} for key, fd in pairs.items()]


@contextlib.asynccontextmanager
async def _criu(
    slot: CriuSlot,
    operation: str,
    criu: Criu,
    *,
    images: int,
    work: int,
    uid: int,
    cgroup: Mapping[str, Any],
    log: str,
    stdio: bool = False,
) -> AsyncIterator[tuple[CriuRun, Swrk]]:
    """A CRIU process for one request; killed and closed at the end."""
    processes.forget(work, log, processes.PRINTED)
    # Options before the command set the work directory; a file in /etc/criu must not affect
    # operations.
    argv = [
        str(criu.binary),
        "--no-default-config",
        "--work-dir",
        processes.WORK,
        # the contents of files are compared before a restore (`snapshots.mapped_files`)
        *(("--file-validation", "filesize") if operation == "restore" else ()),
        "swrk",
        str(SOCKET_FD),
    ]
    fds = processes.duplicates(images, work)
    run = await slot.criu(
        processes.new_name(operation), argv, uid=uid, cgroup=cgroup, fds=fds, stdio=stdio
    )
    try:
        if run.socket is None:
            raise CriuExited(operation, "it was started without a socket")
        said = functools.partial(processes.said, work, log)
        yield run, Swrk(run.socket, messages=criu.messages, exited=run.exited, log=said)
    finally:
        await processes.end(run)
