"""Fork and exec one process: a confined worker or command beside an instance, or CRIU. Runs in the
shim; standard library only."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from snapshotter.shim import cpu_priority
from snapshotter.shim.sandbox import isolation, mounts

CONTROL_FD = 3
"""Descriptor of a worker's end of the control channel."""
FIRST_CRIU_FD = 20
"""First descriptor passed to CRIU; its socket is one below."""
_KIT = f"{mounts.ROOT}/criu"
KIT_LOADER, KIT_PLUGINS = "ld.so", "plugins"
CRIU_KIT = (f"{_KIT}/{KIT_LOADER}", "--inhibit-cache", "--library-path", _KIT, f"{_KIT}/criu")
"""Command that executes CRIU in a tenant's file system (`criu.bundle`)."""
CRIU_KIT_VARIABLES = {"PATH": "", "CRIU_LIBS_DIR": f"{_KIT}/{KIT_PLUGINS}"}
_GROUPS: dict[str, int] = {}
"""Directory of cgroups → a descriptor of it."""
_RESTORED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)


@dataclass(frozen=True, kw_only=True)
class Confinement:
    """Identity and limits of every process of one slot.

    Attributes:
        uid: uid and gid, None to keep the shim's.
        limits: RLIMIT_* names without the prefix.
        env: the whole environment.
        work: working directory.
        log_refused: whether the kernel logs denied system calls.
    """

    uid: int | None
    limits: Mapping[str, int]
    env: Mapping[str, str]
    work: str
    log_refused: bool = False


@dataclass(frozen=True, kw_only=True)
class Cgroup:
    """Files to enter a cgroup (`cgroups.Group`): `procs` for any process, `tasks` for a
    single-threaded process that moves itself.

    Attributes:
        is_nice: whether a process executed there lowers its priority by niceness
            (`cpu_priority.lower`), because there is no cpu cgroup.
    """

    procs: Sequence[str] = ()
    tasks: Sequence[str] = ()
    is_nice: bool = False

    def open_tasks(self) -> list[int]:
        """Descriptors for a fork that moves itself. Raises OSError."""
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
    """Start `argv` in a new session and return its pid. A failed start exits with status 127 and a
    line on stderr.

    `cgroup`: entered before the exec.
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
    """Start CRIU and return its pid. It runs as root, but with the real uid of the processes that
    it traces, which no other uid may trace.

    In an image's root file system the CRIU of the kit is executed, never a file of the image. `fds`
    become 20, 21, …, `connection` 19; output goes to `criu.err` in its work directory, the second
    of `fds`. A failed start exits with status 127.
    """
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
        os.umask(0o077)  # an image contains memory: private wherever its directory is moved
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
    """Move descriptors to the given numbers, whatever their current ones."""
    top = max(places) + 1
    copies = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, top) for number, fd in places.items()}
    for number, copy in copies.items():
        os.dup2(copy, number)  # inheritable


def _restore_signals() -> None:
    for number in _RESTORED_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def enter(files: Sequence[str], pid: int) -> None:
    """Move `pid` (0: the caller) into the groups with these `cgroup.procs` or `tasks` files. Raises
    OSError."""
    for path in files:
        fd = _open_group(path)
        try:
            os.write(fd, str(pid).encode())
        finally:
            os.close(fd)


def hold_groups(directories: Sequence[str]) -> None:
    """Keep these directories open, so that their groups can be entered from any root. Raises
    OSError."""
    for directory in directories:
        _GROUPS[f"{directory}/"] = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def _open_group(path: str) -> int:
    """Open a file of a group for writing. Raises OSError."""
    for directory, fd in _GROUPS.items():
        if path.startswith(directory):
            return os.open(path.removeprefix(directory), os.O_WRONLY | os.O_CLOEXEC, dir_fd=fd)
    return os.open(path, os.O_WRONLY | os.O_CLOEXEC)


def pid_of(pidfd: int) -> int:
    """The pid of a pidfd in this namespace; 0 when the process has exited. Pids that a worker
    reports are not trusted.

    Raises OSError if it is not a pidfd, if it is the shim's own, which must not enter a tenant's
    group, and for a process outside this namespace (proc(5): Pid 0): user code can get descriptors
    of processes that connect to it, or that made its socket (SO_PEERPIDFD, unix(7)).
    """
    with open(f"/proc/self/fdinfo/{pidfd}") as f:
        pid = next((int(line.split()[1]) for line in f if line.startswith("Pid:")), None)
    if pid in (None, 0, os.getpid()):
        raise ProcessLookupError(
            errno.ESRCH, f"descriptor {pidfd} is not a process of this slot other than the shim"
        )
    assert pid is not None
    return max(0, pid)


def is_in(cgroup: Cgroup, pid: int) -> bool:
    """Whether the kernel reports the process in the groups of `tasks` (cgroup v1, proc(5)). False
    when it has exited."""
    try:
        with open(f"/proc/{pid}/cgroup") as f:
            places = [line.rstrip("\n") for line in f]
    except OSError:
        return False
    # base and name, which are equal in all hierarchies
    ends = ["/" + "/".join(path.split("/")[-3:-1]) for path in cgroup.tasks]
    return sum(place.endswith(tuple(ends)) for place in places) >= len(ends)


def enter_group(cgroup: Cgroup, pidfd: int) -> None:
    """Move the process of `pidfd` into a group. Raises OSError, ProcessLookupError when it has
    exited."""
    pid = pid_of(pidfd)
    if not pid:
        raise ProcessLookupError(errno.ESRCH, "the process has exited")
    enter(cgroup.procs, pid)
