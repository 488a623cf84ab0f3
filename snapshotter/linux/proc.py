"""Reads process state from the kernel: proc(5), pidfd_open(2). Numbers of an exited process are
zero."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

_ROUNDS = 100
"""Walks of a tree that keeps forking, or whose processes are not stopped yet."""
_STAND_S = 0.1
"""Limit of all walks together: they block the agent's event loop."""
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def host_pid(pidfd: int) -> int:
    """The pid of `pidfd` in our own PID namespace; 0 when the process has exited."""
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        if line.startswith("Pid:"):
            return max(0, int(line.split()[1]))
    return 0


def pid_namespace(pid: int) -> str | None:
    """The PID namespace of a process (pid_namespaces(7)); None when it has exited, or is not
    visible to us."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def send_signal(pidfd: int, number: signal.Signals) -> None:
    """Signal the process; no error if it has exited."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


async def wait_readable(fd: int) -> None:
    """Wait until a descriptor has data or is closed; until the process of a pidfd has exited."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, ready.cancel)
    try:
        await asyncio.wait([ready])
    finally:
        loop.remove_reader(fd)


def pss_bytes(pid: int) -> int:
    """Proportional set size. Walks the page tables, which takes milliseconds for a big process: not
    for the event loop.

    Without root a Template cannot be inspected (it is not dumpable): returns its resident set size,
    which is no less.
    """
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except PermissionError:
        return rss_bytes(pid)
    except OSError:
        return 0
    return next(
        (int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:")), 0
    )


def waited_ns(pid: int) -> int:
    """How long its first thread was runnable and waited for a processor (kernel,
    Documentation/scheduler/sched-stats)."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
    except (OSError, IndexError):
        return 0


def rss_bytes(pid: int) -> int:
    """Resident set size."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def cpu_ns(pid: int) -> int:
    """CPU time of the process and of the children that it has reaped."""
    try:
        return stat_cpu_ns(Path(f"/proc/{pid}/stat").read_bytes())
    except OSError:
        return 0


def stat_cpu_ns(stat: bytes) -> int:
    """The same from the content of `/proc/<pid>/stat`."""
    fields = stat.rpartition(b")")[2].split()
    return sum(int(fields[i]) for i in (11, 12, 13, 14)) * _TICK_NS


def process_tree(pid: int) -> list[int]:
    """The process and all its descendants, parents first; those that exit during the walk may be
    missing."""
    found = [pid] if Path(f"/proc/{pid}").exists() else []
    for parent in found:  # grows while it is walked
        tasks: list[str] = []
        with contextlib.suppress(OSError):  # it has exited
            tasks = os.listdir(f"/proc/{parent}/task")
        for task in tasks:
            with contextlib.suppress(OSError):
                found += [
                    int(child)
                    for child in Path(f"/proc/{parent}/task/{task}/children").read_text().split()
                ]
    return found


def no_processes() -> Collection[int]:
    """No processes."""
    return ()


def stop_tree(pid: int, beside: Callable[[], Collection[int]] = no_processes) -> set[int]:
    """SIGSTOP the process and all its descendants, parents first, until all are stopped and a walk
    finds no new ones; returns them.

    The child of a process in the middle of a fork appears only in a later walk; it is waited for,
    at most 0.1 s on a machine that does not schedule it. `beside`: processes that belong to the
    tree although their parent has exited.
    """
    stopped: set[int] = set()
    moving: set[int] = set()
    until = time.monotonic() + _STAND_S
    for _ in range(_ROUNDS):
        moving = {one for one in moving if not _stands_still(one)}
        fresh = [
            one for one in dict.fromkeys((*process_tree(pid), *beside())) if one not in stopped
        ]
        for one in fresh:
            _signal(one, signal.SIGSTOP)
        stopped.update(fresh)
        if (not fresh and not moving) or time.monotonic() > until:
            break
        if not fresh:
            time.sleep(0.001)
        moving.update(fresh)
    return stopped


def _stands_still(pid: int) -> bool:
    """Whether it cannot fork: it is stopped, or has exited."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "TtZX"
    except OSError:
        return True


def continue_tree(pid: int, beside: Callable[[], Collection[int]] = no_processes) -> None:
    """SIGCONT all of them, children first: a resumed parent finds its children running."""
    for one in dict.fromkeys((*beside(), *reversed(process_tree(pid)))):
        _signal(one, signal.SIGCONT)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def inside(init_pid: int, pid: int) -> int:
    """Our pid of process `pid` in the PID namespace whose first process is our `init_pid`; 0 if
    there is none."""
    for ours in process_tree(init_pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{ours}/status").read_text().splitlines():
                if line.startswith("NSpid:") and int(line.split()[-1]) == pid:
                    return ours
    return 0
