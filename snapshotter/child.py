"""Fork and exec one confined process: a worker, or a command beside an instance. Runs in the shim; standard library only."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from snapshotter import isolation

CONTROL_FD = 3
"""Where a worker finds its end of the control pair."""
_RESTORED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)


@dataclass(frozen=True, kw_only=True)
class Confinement:
    """What every process of one slot runs as.

    Attributes:
        uid: uid and gid, None to keep the shim's.
        limits: RLIMIT_* names without the prefix.
        env: the whole environment.
        work: working directory.
    """

    uid: int | None
    limits: Mapping[str, int]
    env: Mapping[str, str]
    work: str


@dataclass(frozen=True, kw_only=True)
class Cgroup:
    """Ways into a group (`cgroups.Group`): `procs` for anybody, `tasks` for a single-threaded process by itself."""

    procs: Sequence[str] = ()
    tasks: Sequence[str] = ()

    def open_tasks(self) -> list[int]:
        """Descriptors for a fork that enters by itself. Raises OSError."""
        return [os.open(path, os.O_WRONLY | os.O_CLOEXEC) for path in self.tasks]


def execute(
    argv: Sequence[str],
    confinement: Confinement,
    *,
    env: Mapping[str, str],
    cgroup: Cgroup,
    stdout: int,
    stderr: int,
    control: int | None = None,
) -> int:
    """Start `argv` in a session of its own and return its pid. A failure to start is exit status 127 and a line on stderr.

    `cgroup`: entered first.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        enter(cgroup.tasks or cgroup.procs, 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        if control is not None:
            os.dup2(control, CONTROL_FD)
            os.set_inheritable(CONTROL_FD, True)
        for number in _RESTORED_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        os.chdir(confinement.work)
        isolation.confine(uid=confinement.uid, limits=confinement.limits)
        os.execvpe(argv[0], list(argv), dict(env))
    except (OSError, ValueError, TypeError) as e:
        os.write(2, f"cannot start {argv[0]}: {e}\n".encode(errors="replace"))
    finally:
        os._exit(127)


def enter(files: Sequence[str], pid: int) -> None:
    """Move `pid` (0: the caller) into the groups whose `cgroup.procs` or `tasks` files are given. Raises OSError."""
    for path in files:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, str(pid).encode())
        finally:
            os.close(fd)
