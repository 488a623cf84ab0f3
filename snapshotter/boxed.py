"""The child's half of a build box: runs before the build's command, in its process, and becomes it.

Executed as `python -I -S -B boxed.py` with an order as JSON on stdin; standard library only. With a uid it makes a mount,
PID, IPC and UTS namespace, enters the network namespace of the build, and starts the command in a process that gives up root
for good (no_new_privs, no capabilities, the workers' system call filter). The image being built, its interpreter and a private
/tmp stand at the places where workers will find them.

The command is not PID 1 of the box. That is a process of ours, which the command can neither signal nor trace: it ends when the
command does, and with the agent (PR_SET_PDEATHSIG, prctl(2)), and the kernel kills whatever else lives in the box before anybody
learns that it has ended. So no process of the tenant outlives its step. Without a uid there is no box: the process that waits for the
command is the parent of whatever its descendants leave behind (PR_SET_CHILD_SUBREAPER), and kills that.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from typing import Any

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWPID, _CLONE_NEWNET = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 22, 24, 36, 38
_SECCOMP_MODE_FILTER = 2
_LAST_CAPABILITY = 63
"""Capabilities are a 64-bit set (capabilities(7)); dropping one that the kernel does not know fails harmlessly."""

_SHARED = ("/var/tmp", "/run/lock")
"""Directories of the host that anybody may write: in the box nobody may."""

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Obey the order on stdin; never returns."""
    order: dict[str, Any] = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if order["parent"] is not None:
        _die_with_parent(order["parent"], signal.SIGKILL if order["uid"] is not None else signal.SIGTERM)
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
    """Enter the build's cgroup ("0" is whoever writes it, cgroups(7)) and lower its limits, while we still may."""
    for procs in order.get("procs", ()):
        with open(procs, "w") as group:
            group.write("0")
    for name, most in order.get("limits", {}).items():
        _, hard = resource.getrlimit(getattr(resource, name))
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(getattr(resource, name), (bound, bound))


def _install(program: bytes) -> None:
    """Put a seccomp filter in force, as `isolation.install` does: nothing of ours is on this interpreter's path."""
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    holder = ctypes.create_string_buffer(header, len(header))
    if _libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.c_void_p(ctypes.addressof(holder))) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


def _enter_box(order: dict[str, Any]) -> None:
    if order["network"] is not None:
        _call("setns", order["network"], _CLONE_NEWNET)
        os.close(order["network"])
    _call("unshare", _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWIPC | _CLONE_NEWUTS)
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    os.makedirs(order["root"], exist_ok=True)
    _mount("tmpfs", order["root"], "tmpfs", _MS_NOSUID | _MS_NODEV, "size=64k,mode=755")
    for source, target, writable in order["binds"]:
        if not os.path.isdir(target):
            os.mkdir(target)
        _mount(source, target, None, _MS_BIND | _MS_REC)
        if not writable:
            _mount(None, target, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID)
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


def _start_first_process() -> None:
    """Fork PID 1 of the new namespace. The parent stays outside: it passes on the exit status, and ends the box on SIGTERM.

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


def _start_command() -> None:
    """Fork the process that becomes the command. The parent stays as PID 1, reaps what is left to it, and ends with the command."""
    child = os.fork()
    if child == 0:
        os.setsid()
        return
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _start_watched_command() -> None:
    """Fork the process that becomes the command. The parent passes on its exit status; then, and on SIGTERM, it kills what is left."""
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
    """Those that are left are ours then, and are killed when the kernel says that these have ended."""
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


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if t is None else t.encode() for t in (source, target, kind, data)]
    if _libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mount {source} on {target}: {os.strerror(code)}")


def _call(name: str, *arguments: int) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


if __name__ == "__main__":
    main()
