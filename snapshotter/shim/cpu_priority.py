"""Who gives way to whom on the CPU: boots and background work to calls.

All groups lie below one base (`cgroups`), which has the share of an ordinary program for each
processor; to give way is a matter among them. A boot that somebody waits for has a low weight. What
nobody waits for is an idle group (`cpu.idle`; kernel, admin-guide/cgroup-v2, "CPU"): whichever
other group of ours wants a CPU that it has gets it at once. Before Linux 5.15 it has the least
weight that there is. Without a group of its own for the CPU it has a low niceness, of its session,
which the kernel groups by where no cgroup does (sched(7), "The autogroup feature"), and of its
processes; that only root can take back, so nobody else begins with it.

Standard library only: the shim uses it, too.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

BOOT: Final = ((10.0, 0.125),)
"""For how long a boot that a call or a deploy waits for has which part of its share: where calls
take all CPUs it gets on all the same."""
BACKGROUND: Final = ((5.0, 0.0), (60.0, 0.25))
"""The same for what no call waits for: it holds memory, and has deadlines."""
FORK: Final = (1.0, 0.125)
"""The same for the last step of a COLD start, the fork that was waited for."""
NICENESS: Final = 19
_PER_CPU = {1: 1024, 2: 100}
FILE: Final = {1: "cpu.shares", 2: "cpu.weight"}
_BOUNDS = {1: (2, 262144), 2: (1, 10000)}


def weight(version: int, cpu: float) -> str:
    """What is written to the file of that version's weight."""
    least, most = _BOUNDS[version]
    return str(max(least, min(most, int(cpu * _PER_CPU[version]))))


def weigh(directory: Path, *, version: int, cpu: float, part: float) -> None:
    """A cpu group's part of a busy machine: `part` of `cpu`, in CPUs against other groups'; 0: only
    what nobody else wants.

    The kernel forgets the weight of an idle group, and refuses it a new one. Raises OSError.
    """
    with contextlib.suppress(FileNotFoundError):
        if part == 0:
            _write(directory / "cpu.idle", "1")
            return
        _write(directory / "cpu.idle", "0")
    _write(directory / FILE[version], weight(version, cpu * part))


def lower() -> None:
    """For the calling process, the first of its session."""
    with contextlib.suppress(OSError):
        _write(Path("/proc/self/autogroup"), str(NICENESS))
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)


def restore(pid: int) -> None:
    """Undo `be_nice` for the session, and the process group with all its threads, that `pid` leads;
    nothing when it is gone."""
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
