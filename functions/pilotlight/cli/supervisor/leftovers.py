"""Ends what a killed supervisor left behind: processes that it started, slots with their instances,
and the files of both.

What belongs to a home is found in its own run directory (pid files with start times, sockets of
slots, recorded control groups), while its lock is held, so that no `pilotlight up` starts
meanwhile."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pilotlight.cli.supervisor.local_platform import HomeLock, LocalPlatform, last_run
from pilotlight.cli.supervisor.supervisor import Announce, Notice, platform_processes, stop_orphans
from pilotlight.errors import Conflict

if TYPE_CHECKING:
    from snapshotter.starts.leftovers import Leftovers

_INSTANCE_GRACE_S = 10.0
_FILES = ("*.pid", "*.sock", "controller/*.sock", "functions/*.sock")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What was ended.

    Attributes:
        supervisor: pid of the killed supervisor; None if it is not known.
        processes: name → pid of its processes.
        left: what the node agent left; None if instances are kept.
    """

    supervisor: int | None
    processes: dict[str, int]
    left: Leftovers | None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was left."""
        return not self.processes and (self.left is None or self.left.is_empty)


async def end_leftovers(
    platform: LocalPlatform, *, keep_instances: bool, announce: Announce
) -> Ended:
    """End what is left of a killed supervisor of this home, last started first. Raises Conflict if
    one runs, or if an agent that is not its own still has the slots."""
    before = last_run(platform)
    if before is None:
        return Ended(supervisor=None, processes={}, left=None)
    config, run = Path(before.config), Path(before.run)
    lock = HomeLock(platform)
    lock.acquire(keeps_record=True)
    try:
        specs = platform_processes(config, activators=1 + _last_activator(run))
        processes = await stop_orphans(specs, run=run, announce=announce)
        left = None if keep_instances else await _end_slots(run, announce)
        for pattern in _FILES:
            for file in run.glob(pattern):
                file.unlink(missing_ok=True)
        return Ended(supervisor=before.pid, processes=processes, left=left)
    finally:
        lock.release()


async def _end_slots(run: Path, announce: Announce) -> Leftovers:
    from snapshotter.starts.leftovers import end_leftovers as end_slots

    if (agent := _listener_of(run / "snapshotter.sock")) is not None:
        raise Conflict(
            f"a node agent (process {agent}) that no supervisor started has the instances in {run}",
            hint=f"Stop it first: kill {agent}",
        )
    left = await end_slots(run, grace_s=_INSTANCE_GRACE_S)
    if not left.is_empty:
        announce(Notice(kind="cleared", process="snapshotter", text=f"ended {left}"))
    return left


def _last_activator(run: Path) -> int:
    """Highest index of an activator with a pid file."""
    indexes = [file.stem.rpartition("-")[2] for file in run.glob("activator-*.pid")]
    return max((int(index) for index in indexes if index.isdecimal()), default=0)


def _listener_of(path: Path) -> int | None:
    """The pid of the process that listens on a Unix socket (unix(7), SO_PEERCRED); None if there is
    none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(str(path))
        except OSError:
            return None
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid: int = struct.unpack("3i", peer)[0]
    return pid if Path(f"/proc/{pid}").exists() else None
