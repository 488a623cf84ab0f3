"""CPU priorities: boots and background work run below calls.

All groups are below one base (`cgroups`), which has the share of an ordinary program for each
processor; priorities apply among them. A boot with a waiting caller has a low weight. Background
work is an idle group (`cpu.idle`; kernel, admin-guide/cgroup-v2, "CPU"): any other of our groups
preempts it at once. Before Linux 5.15 it has the lowest weight. Without a cpu cgroup it has a low
niceness, both of its session, by which the kernel groups processes without a cgroup (sched(7), "The
autogroup feature"), and of its processes; only root can restore that, so without root nothing
starts with it.

Standard library only: the shim uses it as well.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

BOOT: Final = ((10.0, 0.125),)
"""(seconds, fraction of its share) of a boot that a call or a deployment waits for: it makes
progress even if calls use all CPUs."""
BACKGROUND: Final = ((5.0, 0.0), (60.0, 0.0625))
"""The same for work without a waiting call: it holds memory and has deadlines, and gets less than
a boot with a waiting caller."""
FORK: Final = (1.0, 0.125)
"""The same for the fork at the end of a COLD start."""
NICENESS: Final = 19
_PER_CPU = {1: 1024, 2: 100}
FILE: Final = {1: "cpu.shares", 2: "cpu.weight"}
_BOUNDS = {1: (2, 262144), 2: (1, 10000)}


def weight(version: int, cpu: float) -> str:
    """Content of the weight file of that cgroup version."""
    least, most = _BOUNDS[version]
    return str(max(least, min(most, int(cpu * _PER_CPU[version]))))


def weigh(directory: Path, *, version: int, cpu: float, part: float) -> None:
    """Set a cpu group's share of a busy machine: fraction `part` of `cpu`, in CPUs relative to
    other groups; 0: only idle time.

    The kernel discards the weight of an idle group, and rejects a new one. Raises OSError.
    """
    with contextlib.suppress(FileNotFoundError):
        if part == 0:
            _write(directory / "cpu.idle", "1")
            return
        _write(directory / "cpu.idle", "0")
    _write(directory / FILE[version], weight(version, cpu * part))


def lower() -> None:
    """Lower the priority of the calling process, the leader of its session."""
    with contextlib.suppress(OSError):
        _write(Path("/proc/self/autogroup"), str(NICENESS))
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)


def restore(pid: int) -> None:
    """Undo `lower` for the session, and the process group with all its threads, led by `pid`; no
    effect when it has exited."""
    with contextlib.suppress(OSError):
        _write(Path(f"/proc/{pid}/autogroup"), "0")
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PGRP, pid, os.getpriority(os.PRIO_PROCESS, 0))


def _write(file: Path, text: str) -> None:
    fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
