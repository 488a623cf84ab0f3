"""What the kernel says about a process: proc(5), pidfd_open(2). Numbers of a process that is gone
are zero."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

_ROUNDS = 100
"""Looks at a tree that keeps forking, or whose processes do not stand still yet."""
_STAND_S = 0.1
"""For all looks together: the agent does nothing else meanwhile."""
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def host_pid(pidfd: int) -> int:
    """The pid in our own PID namespace behind `pidfd`; 0 when the process is gone."""
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        if line.startswith("Pid:"):
            return max(0, int(line.split()[1]))
    return 0


def pid_namespace(pid: int) -> str | None:
    """The PID namespace that a process is in (pid_namespaces(7)); None when it is gone, or not ours
    to look at."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def send_signal(pidfd: int, number: signal.Signals) -> None:
    """Signal the process; one that is gone is no error."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


async def wait_gone(pidfd: int) -> None:
    """Return when the process behind `pidfd` has ended."""
    loop = asyncio.get_running_loop()
    gone: asyncio.Future[None] = loop.create_future()
    loop.add_reader(pidfd, gone.cancel)
    try:
        await asyncio.wait([gone])
    finally:
        loop.remove_reader(pidfd)


def pss_bytes(pid: int) -> int:
    """Proportional set size. Walks the page tables: milliseconds for a big process, so not for the
    event loop.

    Without root nobody looks into a Template (it is not dumpable): its resident set size, which is
    no less."""
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
    """For how long its first thread was ready to run and had no processor (kernel,
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
    """CPU time of the process and of its children that it reaped."""
    try:
        return stat_cpu_ns(Path(f"/proc/{pid}/stat").read_bytes())
    except OSError:
        return 0


def stat_cpu_ns(stat: bytes) -> int:
    """The same from what `/proc/<pid>/stat` says."""
    fields = stat.rpartition(b")")[2].split()
    return sum(int(fields[i]) for i in (11, 12, 13, 14)) * _TICK_NS


def process_tree(pid: int) -> list[int]:
    """The process and all its descendants, parents first; those that end meanwhile are missing."""
    found = [pid] if Path(f"/proc/{pid}").exists() else []
    for parent in found:  # grows while it is walked
        tasks: list[str] = []
        with contextlib.suppress(OSError):  # it ended meanwhile
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
    """SIGSTOP the process and all its descendants, parents first, until all stand still and a look
    finds nobody new; those it stopped.

    One that was in the middle of a fork has a child that no look found until then: it is waited
    for, on a machine that does not schedule it for 0.1 s at most. `beside`: who belongs to it
    though its parent has ended."""
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
    """Whether it can fork no more: stopped, or gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "TtZX"
    except OSError:
        return True


def continue_tree(pid: int, beside: Callable[[], Collection[int]] = no_processes) -> None:
    """SIGCONT all of them, children first: a parent that goes on finds its children going."""
    for one in dict.fromkeys((*beside(), *reversed(process_tree(pid)))):
        _signal(one, signal.SIGCONT)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def inside(init_pid: int, pid: int) -> int:
    """Our number for process `pid` of the PID namespace whose first process is our `init_pid`; 0
    when it is not there."""
    for ours in process_tree(init_pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{ours}/status").read_text().splitlines():
                if line.startswith("NSpid:") and int(line.split()[-1]) == pid:
                    return ours
    return 0
