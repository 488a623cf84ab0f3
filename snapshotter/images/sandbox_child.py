"""The child's half of a build box: runs before the build's command, in its process, and becomes it.

Executed as `python -I -S -B boxed.py` with an order as JSON on stdin; standard library only. With a
uid it makes a mount, PID, IPC and UTS namespace, enters the network namespace of the build, and
starts the command in a process that gives up root for good (no_new_privs, no capabilities, the
workers' system call filter). The image being built, its interpreter and a private /tmp stand at the
places where workers will find them.

With a root file system of the image's own (`rootfs`) the box is entered by pivot_root(2), and
nothing of the machine's is seen in it. There the command is root of a user namespace
(user_namespaces(7)), whose ids are nobody's on the machine, made after all that is mounted: it
cannot mount, and what it may do beyond an ordinary user concerns the image's own files.

The command is not PID 1 of the box. That is a process of ours, which the command can neither signal
nor trace: it ends when the command does, and with the agent (PR_SET_PDEATHSIG, prctl(2)), and the
kernel kills whatever else lives in the box before anybody learns that it has ended. So no process
of the tenant outlives its step. Without a uid there is no box: the process that waits for the
command is the parent of whatever its descendants leave behind (PR_SET_CHILD_SUBREAPER), and kills
that."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from typing import Any, NoReturn

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWPID, _CLONE_NEWNET = (
    0x20000,
    0x4000000,
    0x8000000,
    0x20000000,
    0x40000000,
)
_CLONE_NEWUSER = 0x10000000
_MNT_DETACH = 2
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
(
    _PR_SET_PDEATHSIG,
    _PR_SET_SECCOMP,
    _PR_CAPBSET_DROP,
    _PR_SET_CHILD_SUBREAPER,
    _PR_SET_NO_NEW_PRIVS,
) = 1, 22, 24, 36, 38
_SECCOMP_MODE_FILTER = 2
_LAST_CAPABILITY = 63
"""Capabilities are a 64-bit set (capabilities(7)); dropping one that the kernel does not know fails
harmlessly."""

_KEPT_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 18, 31)
"""CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SYS_CHROOT, SETFCAP: what installing a
package takes (capabilities(7))."""
_NODES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}
_PLACES = ("dev", "etc", "proc", "run", "tmp")
"""Directories that the root file system of an image must have: something is mounted there, or in
it."""

_SHARED = ("/var/tmp", "/run/lock")
"""Directories of the host that anybody may write: in the box nobody may."""

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Obey the order on stdin; never returns."""
    order: dict[str, Any] = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if order["parent"] is not None:
        _die_with_parent(
            order["parent"], signal.SIGKILL if order["uid"] is not None else signal.SIGTERM
        )
    os.umask(0o022)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _bound(order)
    if order["uid"] is not None:
        _enter_box(order)
    elif order["parent"] is not None:
        _start_watched_command()
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if order["filter"]:
        _install(bytes.fromhex(order["filter"]))
    os.chdir(order["cwd"])
    try:
        os.execve(order["argv"][0], order["argv"], order["environ"])
    except OSError as e:
        print(f"{order['argv'][0]}: {e.strerror}", flush=True)
        os._exit(127)


def _bound(order: dict[str, Any]) -> None:
    """Enter the build's cgroup ("0" is whoever writes it, cgroups(7)) and lower its limits, while
    we still may."""
    for procs in order.get("procs", ()):
        with open(procs, "w") as group:
            group.write("0")
    for name, most in order.get("limits", {}).items():
        _, hard = resource.getrlimit(getattr(resource, name))
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(getattr(resource, name), (bound, bound))


def _install(program: bytes) -> None:
    """Put a seccomp filter in force, as `isolation.install` does: nothing of ours is on this
    interpreter's path."""
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    holder = ctypes.create_string_buffer(header, len(header))
    if (
        _libc.prctl(
            _PR_SET_SECCOMP,
            ctypes.c_ulong(_SECCOMP_MODE_FILTER),
            ctypes.c_void_p(ctypes.addressof(holder)),
        )
        != 0
    ):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


def _enter_box(order: dict[str, Any]) -> None:
    if order["network"] is not None:
        _call("setns", order["network"], _CLONE_NEWNET)
        os.close(order["network"])
    _call("unshare", _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWIPC | _CLONE_NEWUTS)
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    if order["rootfs"] is not None:
        _prepare_rootfs(order)
        # nothing is imported from now on, here and outside: all files will be the tenant's
        sys.path.clear()
        sys.meta_path.clear()
        _start_first_process()
        _pivot(order["rootfs"], order["lent"], order["ids"][0])
        _start_command(ids=order["ids"])
        _become_root_of_namespace()
        return
    os.makedirs(order["root"], exist_ok=True)
    _mount("tmpfs", order["root"], "tmpfs", _MS_NOSUID | _MS_NODEV, "size=64k,mode=755")
    _bind_all(order["binds"], "")
    if order["resolver"] is not None and os.path.exists("/etc/resolv.conf"):
        _mount(order["resolver"], os.path.realpath("/etc/resolv.conf"), None, _MS_BIND)
    for hidden in filter(os.path.isfile, order["hidden"]):
        _mount("/dev/null", os.path.realpath(hidden), None, _MS_BIND)
    _mount("/tmp", "/dev/shm", None, _MS_BIND)
    for shared in filter(os.path.isdir, _SHARED):
        _mount(shared, shared, None, _MS_BIND)
        _mount(None, shared, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    _start_first_process()
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV)
    _start_command()
    for capability in range(_LAST_CAPABILITY + 1):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    os.setgroups([])
    os.setresgid(order["uid"], order["uid"], order["uid"])
    os.setresuid(order["uid"], order["uid"], order["uid"])


def _bind_all(binds: list[tuple[str, str, bool]], at: str) -> None:
    for source, name, writable in binds:
        target = f"{at}{name}"
        if not os.path.isdir(source):
            os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o444))
        elif not os.path.isdir(target):
            os.mkdir(target)
        _mount(source, target, None, _MS_BIND | _MS_REC)
        if not writable:
            _mount(None, target, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID)


def _prepare_rootfs(order: dict[str, Any]) -> None:
    """Mount everything below the image's root file system. No step runs meanwhile; what earlier
    ones left is looked at, not followed."""
    at, first = order["rootfs"], order["ids"][0]
    for name in _PLACES:
        if not os.path.isdir(f"{at}/{name}") or os.path.islink(f"{at}/{name}"):
            _give_up(f"/{name} of the image is no directory any more: an earlier step removed it")
    _mount(at, at, None, _MS_BIND)
    _mount(
        "tmpfs",
        f"{at}/run",
        "tmpfs",
        _MS_NOSUID | _MS_NODEV,
        f"size=64m,mode=755,uid={first},gid={first}",
    )
    os.makedirs(f"{at}{order['root']}")
    _bind_all(order["binds"], at)
    _mount("tmpfs", f"{at}/dev", "tmpfs", _MS_NOSUID, "size=64k,mode=755")
    for name in _NODES:
        os.close(os.open(f"{at}/dev/{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o444))
        _mount(f"/dev/{name}", f"{at}/dev/{name}", None, _MS_BIND)
    for name, target in _LINKS.items():
        os.symlink(target, f"{at}/dev/{name}")
    for name in ("pts", "shm"):
        os.mkdir(f"{at}/dev/{name}")
    _mount(
        "devpts",
        f"{at}/dev/pts",
        "devpts",
        _MS_NOSUID | _MS_NOEXEC,
        "newinstance,ptmxmode=0666,mode=0620",
    )
    _mount("tmpfs", f"{at}/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777")
    resolver = f"{at}/etc/resolv.conf"
    if os.path.islink(resolver) or not os.path.isfile(resolver):
        if os.path.lexists(resolver):
            os.unlink(resolver)
        os.close(os.open(resolver, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        os.chown(resolver, first, first)
    _mount(order["resolver"] or os.path.realpath("/etc/resolv.conf"), resolver, None, _MS_BIND)


def _pivot(at: str, lent: list[str], owner: int) -> None:
    """Enter the root file system; in the box's first process.

    `lent`: directories of the machine that are seen there, too. They are mounted when links lead
    nowhere but into the image."""
    held = [(path, os.open(path, os.O_PATH | os.O_DIRECTORY)) for path in lent]
    _mount("proc", f"{at}/proc", "proc", _MS_NOSUID | _MS_NODEV)
    os.chdir(at)
    number = {"x86_64": 155, "aarch64": 41}[os.uname().machine]
    if _libc.syscall(number, b".", b".") != 0:
        raise OSError(ctypes.get_errno(), "pivot_root")
    for path, source in held:
        _make_directories(path, owner)
        _mount(f"/proc/self/fd/{source}", path, None, _MS_BIND)
        _mount(None, path, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
        os.close(source)
    _call("umount2", b".", _MNT_DETACH)
    os.chdir("/")


def _make_directories(path: str, owner: int) -> None:
    parts = path.split("/")
    for i in range(2, len(parts) + 1):
        directory = "/".join(parts[:i])
        if not os.path.lexists(directory):
            os.mkdir(directory, 0o755)
            os.chown(directory, owner, owner, follow_symlinks=False)


def _become_root_of_namespace() -> None:
    """Root of a user namespace whose ids the box's first process has set, with few of root's
    capabilities even there."""
    for capability in range(_LAST_CAPABILITY + 1):
        if capability not in _KEPT_CAPABILITIES:
            _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def _give_up(message: str) -> NoReturn:
    print(message, flush=True)
    os._exit(1)


def _start_first_process() -> None:
    """Fork PID 1 of the new namespace. The parent stays outside: it passes on the exit status, and
    ends the box on SIGTERM.

    waitpid(2) for a PID 1 returns when every process of its namespace is gone (pid_namespaces(7)).
    """
    heard = {signal.SIGTERM, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    child = os.fork()
    if child:
        while signal.sigwait(heard) == signal.SIGTERM:
            os.kill(child, signal.SIGKILL)
        os._exit(_status_of(child))
    _call("prctl", _PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_command(ids: tuple[int, int] | None = None) -> None:
    """Fork the process that becomes the command. The parent stays as PID 1, reaps what is left to
    it, and ends with the command.

    `ids`: the first and how many that a user namespace of the command's has.
    """
    made, mapped = (os.pipe(), os.pipe()) if ids is not None else ((-1, -1), (-1, -1))
    child = os.fork()
    if child == 0:
        os.setsid()
        if ids is not None:
            _call("unshare", _CLONE_NEWUSER)
            os.write(made[1], b"1")
            os.read(mapped[0], 1)
        return
    if ids is not None:
        os.close(made[1])
        if os.read(made[0], 1):  # else it failed, and has said why
            for name in ("uid_map", "gid_map"):
                with open(f"/proc/{child}/{name}", "w") as map_file:
                    map_file.write(f"0 {ids[0]} {ids[1]}")
            os.write(mapped[1], b"1")
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _start_watched_command() -> None:
    """Fork the process that becomes the command. The parent passes on its exit status; then, and on
    SIGTERM, it kills what is left."""
    _call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    heard = {signal.SIGTERM, signal.SIGCHLD}
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)
        return
    status = None
    while True:
        if signal.sigwait(heard) == signal.SIGTERM or status is not None:
            _kill_children()
        try:
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                if reaped[0] == child:
                    status = os.waitstatus_to_exitcode(reaped[1]) & 0xFF
        except ChildProcessError:
            os._exit(1 if status is None else status)
        if status is not None:
            _kill_children()


def _kill_children() -> None:
    """Those that are left are ours then, and are killed when the kernel says that these have
    ended."""
    for directory in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{directory}/stat") as stat:
                parent = int(stat.read().rpartition(")")[2].split()[1])
            if parent == os.getpid():
                os.kill(int(directory), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue


def _status_of(child: int) -> int:
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) & 0xFF


def _die_with_parent(parent: int, how: signal.Signals) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {how, signal.SIGCHLD} if how == signal.SIGTERM else ())
    _call("prctl", _PR_SET_PDEATHSIG, int(how), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it died before it could be watched


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    texts = [None if t is None else t.encode() for t in (source, target, kind, data)]
    if _libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mount {source} on {target}: {os.strerror(code)}")


def _call(name: str, *arguments: int | bytes) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


if __name__ == "__main__":
    main()
