"""CPU time of processes per request, and the processor that they run on. CPU time says more than
throughput does: it does not depend on what else the machine does at the same time, and the shares
of a call add up.

Source: proc(5), `/proc/PID/stat`: user and system time of all threads. The kernel counts in steps
of 10 ms, so a run should take a second at least."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.load import Load

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_CREDENTIALS = struct.Struct("3i")


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    # fields 14 and 15, the name in parentheses being the second
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / _TICKS_PER_S


def listener_pid(path: Path) -> int:
    """The process that listens on a Unix socket (unix(7), SO_PEERCRED)."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[0])


def grandchild_pid(name: str) -> int:
    """The only child of this process's child `name`, such as nginx's worker. Raises ValueError when
    there is another number of them."""
    masters = [pid for pid in _children(os.getpid()) if _name(pid) == name]
    (found,) = [pid for master in masters for pid in _children(master)]
    return found


class CpuPerCall:
    """CPU time per request of some processes in the runs of one arm.

    Attributes:
        us: microseconds per request by process, one number per run."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        """`pids`: by the name under which they are reported."""
        self._pids = dict(pids)
        self.us: dict[str, list[float]] = {name: [] for name in pids}

    def during(self, run: Callable[[], Load]) -> Callable[[], Load]:
        """Return `run`, measured until it returns: what it leaves behind (records to ship) belongs
        to it as far as it waits."""

        def measured() -> Load:
            before_s = {name: cpu_s(pid) for name, pid in self._pids.items()}
            load = run()
            for name, pid in self._pids.items():
                self.us[name].append((cpu_s(pid) - before_s[name]) / load.requests * 1e6)
            return load

        return measured

    def together(self, *names: str) -> list[float]:
        """Microseconds per request of several processes, by run."""
        return [sum(parts) for parts in zip(*(self.us[name] for name in names), strict=True)]


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def move(pid: int, processors: set[int]) -> None:
    """Bind a process, its descendants and all of their threads to processors. What they start later
    inherits that."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), processors)
        for child in (task / "children").read_text().split():
            move(int(child), processors)
