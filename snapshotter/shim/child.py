"""Fork and exec one process: a worker or a command beside an instance, confined; or CRIU. Runs in
the shim; standard library only."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from snapshotter.shim import cpu_priority, isolation, mounts

CONTROL_FD = 3
"""Where a worker finds its end of the control pair."""
FIRST_CRIU_FD = 20
"""Number of the first descriptor that is handed to CRIU; its socket is one below."""
_KIT = f"{mounts.ROOT}/criu"
KIT_LOADER, KIT_PLUGINS = "ld.so", "plugins"
CRIU_KIT = (f"{_KIT}/{KIT_LOADER}", "--inhibit-cache", "--library-path", _KIT, f"{_KIT}/criu")
"""What executes CRIU where the file system is a tenant's (`criu.bundle`)."""
CRIU_KIT_VARIABLES = {"PATH": "", "CRIU_LIBS_DIR": f"{_KIT}/{KIT_PLUGINS}"}
_GROUPS: dict[str, int] = {}
"""Directory of control groups → a descriptor of it."""
_RESTORED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)


@dataclass(frozen=True, kw_only=True)
class Confinement:
    """What every process of one slot runs as.

    Attributes:
        uid: uid and gid, None to keep the shim's.
        limits: RLIMIT_* names without the prefix.
        env: the whole environment.
        work: working directory.
        log_refused: whether the kernel writes down system calls that are refused.
    """

    uid: int | None
    limits: Mapping[str, int]
    env: Mapping[str, str]
    work: str
    log_refused: bool = False


@dataclass(frozen=True, kw_only=True)
class Cgroup:
    """Ways into a group (`cgroups.Group`): `procs` for anybody, `tasks` for a single-threaded
    process by itself.

    Attributes:
        is_nice: a process that is executed there gives way by its niceness
        (`cpu_priority.be_nice`), for want of a cpu group.
    """

    procs: Sequence[str] = ()
    tasks: Sequence[str] = ()
    is_nice: bool = False

    def open_tasks(self) -> list[int]:
        """Descriptors for a fork that enters by itself. Raises OSError."""
        return [_open_group(path) for path in self.tasks]


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
    """Start `argv` in a session of its own and return its pid. A failure to start is exit status
    127 and a line on stderr.

    `cgroup`: entered first.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        if cgroup.is_nice:
            cpu_priority.lower()
        enter(cgroup.tasks or cgroup.procs, 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        if control is not None:
            os.dup2(control, CONTROL_FD)
            os.set_inheritable(CONTROL_FD, True)
        _restore_signals()
        os.chdir(confinement.work)
        isolation.refuse_huge_pages()
        isolation.confine(
            uid=confinement.uid, limits=confinement.limits, log_refused=confinement.log_refused
        )
        os.execvpe(argv[0], list(argv), dict(env))
    except (OSError, ValueError, TypeError) as e:
        os.write(2, f"cannot start {argv[0]}: {e}\n".encode(errors="replace"))
    finally:
        os._exit(127)


def execute_criu(
    argv: Sequence[str], fds: Sequence[int], *, uid: int, cgroup: Cgroup, connection: int | None
) -> int:
    """Start CRIU and return its pid: root, but with the real uid of those whom it is to trace, who
    may be traced by nobody else.

    In an image's root file system it is that of the kit, never one of the image's files. `fds`
    become 20, 21, …, `connection` 19; what it prints goes to `criu.err` in its work directory, the
    second of `fds`. A failure to start is exit status 127."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        enter(cgroup.tasks or cgroup.procs, 0)
        _restore_signals()
        isolation.refuse_huge_pages()
        places = {FIRST_CRIU_FD + i: fd for i, fd in enumerate(fds)}
        if connection is not None:
            places[FIRST_CRIU_FD - 1] = connection
        _place(places)
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 0)
        errors = os.open(
            "criu.err",
            os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW,
            0o600,
            dir_fd=FIRST_CRIU_FD + 1,
        )
        for stream in (1, 2):
            os.dup2(errors, stream)
        os.umask(0o077)  # an image is memory: nobody else's, wherever its directory is moved
        if uid:
            os.setresgid(uid, 0, 0)
            os.setresuid(uid, 0, 0)
        if mounts.is_image():
            os.execve(CRIU_KIT[0], [*CRIU_KIT, *argv[1:]], CRIU_KIT_VARIABLES)
        os.execve(argv[0], list(argv), {"PATH": os.defpath})
    except (OSError, ValueError, TypeError, IndexError) as e:
        os.write(2, f"cannot start {argv[0]}: {e}\n".encode(errors="replace"))
    finally:
        os._exit(127)


def _place(places: Mapping[int, int]) -> None:
    """Give descriptors their numbers, whatever numbers they have now."""
    top = max(places) + 1
    copies = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, top) for number, fd in places.items()}
    for number, copy in copies.items():
        os.dup2(copy, number)  # inheritable


def _restore_signals() -> None:
    for number in _RESTORED_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def enter(files: Sequence[str], pid: int) -> None:
    """Move `pid` (0: the caller) into the groups whose `cgroup.procs` or `tasks` files are given.
    Raises OSError."""
    for path in files:
        fd = _open_group(path)
        try:
            os.write(fd, str(pid).encode())
        finally:
            os.close(fd)


def hold_groups(directories: Sequence[str]) -> None:
    """Keep these directories open: their groups can be entered from any root. Raises OSError."""
    for directory in directories:
        _GROUPS[f"{directory}/"] = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def _open_group(path: str) -> int:
    """A file of a group, to be written. Raises OSError."""
    for directory, fd in _GROUPS.items():
        if path.startswith(directory):
            return os.open(path.removeprefix(directory), os.O_WRONLY | os.O_CLOEXEC, dir_fd=fd)
    return os.open(path, os.O_WRONLY | os.O_CLOEXEC)


def pid_of(pidfd: int) -> int:
    """The pid behind it, in this namespace; 0 when it is gone. What a worker says of pids is not
    believed.

    Raises OSError when it is no pidfd, when it is the shim's own, which enters no tenant's group,
    and for a process outside of this namespace (proc(5): Pid 0): user code can have descriptors of
    whoever connects to it, or made its socket (SO_PEERPIDFD, unix(7))."""
    with open(f"/proc/self/fdinfo/{pidfd}") as f:
        pid = next((int(line.split()[1]) for line in f if line.startswith("Pid:")), None)
    if pid in (None, 0, os.getpid()):
        raise ProcessLookupError(
            errno.ESRCH, f"descriptor {pidfd} names no process of this slot but the shim"
        )
    assert pid is not None
    return max(0, pid)


def is_in(cgroup: Cgroup, pid: int) -> bool:
    """Whether the process is in the groups of `tasks`, by the kernel's word (cgroup v1, proc(5)).
    False when it is gone."""
    try:
        with open(f"/proc/{pid}/cgroup") as f:
            places = [line.rstrip("\n") for line in f]
    except OSError:
        return False
    # base and name: all hierarchies have the same
    ends = ["/" + "/".join(path.split("/")[-3:-1]) for path in cgroup.tasks]
    return sum(place.endswith(tuple(ends)) for place in places) >= len(ends)


def enter_group(cgroup: Cgroup, pidfd: int) -> None:
    """Move the process behind `pidfd` into a group. Raises OSError, ProcessLookupError when it is
    gone."""
    pid = pid_of(pidfd)
    if not pid:
        raise ProcessLookupError(errno.ESRCH, "the process is gone")
    enter(cgroup.procs, pid)
