"""The CPU time that an instance has used so far, read for billing by a process on the same machine.

The counter is a file of the instance's cgroup: `cpuacct.usage` (cgroup v1, nanoseconds) or
`cpu.stat` (v2, microseconds). It counts every process that was ever in the group, including
commands executed beside the instance and processes whose parent has exited. Without a cgroup the
counter is `/proc/<pid>/stat` of the worker (proc(5), in steps of 10 ms), which includes children
only once the worker has reaped them.

The kernel adds the time of a running process at its next tick or context switch, so a counter is up
to 10 ms behind.
"""

from __future__ import annotations

import contextlib
import os
from typing import Self

from snapshotter.linux import proc
from snapshotter.types import InstanceInfo

_READ_BYTES = 4096
_MICROSECONDS = b"usage_usec"


class CpuCounter:
    """One instance's counter. Keeps its file open until `close`."""

    __slots__ = ("_descriptor", "_file", "_parse")

    def __init__(self, file: str, pid: int) -> None:
        """`file`: the cgroup's counter; "" reads that of the process `pid` instead."""
        self._file = file or f"/proc/{pid}/stat"
        self._parse = counted_ns if file else proc.stat_cpu_ns
        self._descriptor = -1
        with contextlib.suppress(OSError):  # the instance has exited
            self._descriptor = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC)

    @classmethod
    def of(cls, info: InstanceInfo) -> Self | None:
        """The counter of an instance on this machine; None for an instance elsewhere, which cannot
        be read."""
        return cls(info.cpu_file, info.pid) if info.cpu_file or info.pid > 0 else None

    def __repr__(self) -> str:
        return f"<CpuCounter {self._file}>"

    def read_ns(self) -> int | None:
        """CPU time so far; None when the instance has exited."""
        if self._descriptor < 0:
            return None
        try:
            return self._parse(os.pread(self._descriptor, _READ_BYTES, 0))
        except OSError:
            return None  # the group was removed, or the process has ended

    def close(self) -> None:
        """Close the file. Idempotent; `read_ns` returns None afterwards."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def counted_ns(content: bytes) -> int:
    """Parse nanoseconds from the counter file of either cgroup version. Raises ValueError."""
    name, _, rest = content.partition(b" ")
    return int(rest.split(maxsplit=1)[0]) * 1000 if name == _MICROSECONDS else int(content)
