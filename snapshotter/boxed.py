"""The child's half of a build box: runs before the build's command, in its process, and becomes it.

Executed as `python -I -S -B boxed.py` with an order as JSON on stdin; standard library only. With a uid it makes a mount,
PID, IPC and UTS namespace in which the image being built, its interpreter and a private /tmp stand at the places where
workers will find them, gives up root for good (no_new_privs, no capabilities, the workers' system call filter) and
executes the command. Everything in the box dies with its PID 1, and that with the agent (PR_SET_PDEATHSIG, prctl(2)).
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import resource
import signal
import sys
from typing import Any

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWPID = 0x20000, 0x4000000, 0x8000000, 0x20000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38
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
        _die_with_parent(order["parent"])
    os.umask(0o022)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _bound(order)
    isolation = _isolation() if order["uid"] is not None else None
    if order["uid"] is not None:
        _enter_box(order)
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if isolation is not None:
        isolation.install_filter(os.uname().machine)
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


def _isolation() -> Any:
    """The module beside this one, by its file: nothing of ours is on this interpreter's path."""
    spec = importlib.util.spec_from_file_location("isolation", os.path.join(os.path.dirname(__file__), "isolation.py"))
    if spec is None or spec.loader is None:
        raise ImportError("snapshotter/isolation.py is gone")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _enter_box(order: dict[str, Any]) -> None:
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
    _mount("/tmp", "/dev/shm", None, _MS_BIND)
    for shared in filter(os.path.isdir, _SHARED):
        _mount(shared, shared, None, _MS_BIND)
        _mount(None, shared, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    _become_first_process()
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV)
    for capability in range(_LAST_CAPABILITY + 1):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    os.setgroups([])
    os.setresgid(order["uid"], order["uid"], order["uid"])
    os.setresuid(order["uid"], order["uid"], order["uid"])
    _call("prctl", _PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)  # a change of uid clears it


def _become_first_process() -> None:
    """Fork into the new PID namespace; the parent stays outside as a shadow that passes on the exit status."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    _call("prctl", _PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _die_with_parent(parent: int) -> None:
    _call("prctl", _PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
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
