"""The child process of a build sandbox: it sets up the sandbox, then executes the build's command.

Executed as `python -I -S -B sandbox_child.py` with an order as JSON on stdin; standard library
only. With a uid it creates a mount, PID, IPC and UTS namespace, enters the network namespace of the
build, and starts the command in a process that drops root permanently (no_new_privs, no
capabilities, the workers' system call filter). The image being built, its interpreter and a private
/tmp are mounted at the paths that workers use, and links lead from the root directory to copied
files with absolute paths, in a root directory of the sandbox's own.

If the image has its own root file system (`rootfs`), the sandbox is entered by pivot_root(2), and
nothing of the machine is visible in it. There the command is root of a user namespace
(user_namespaces(7)), whose ids are unused on the machine and which is created after all mounts: it
cannot mount, and its extra privileges apply only to the image's own files.

The command is not PID 1 of the sandbox. PID 1 is a process of the platform, which the command can
neither signal nor trace: it exits when the command does, and with the agent (PR_SET_PDEATHSIG,
prctl(2)), and the kernel kills all other processes of the sandbox before its exit is reported. So
no tenant process outlives its step. Without a uid there is no sandbox: the process that waits for
the command is a subreaper (PR_SET_CHILD_SUBREAPER) and kills all remaining descendants."""

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
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_MOVE, _MS_REC = (
    1,
    2,
    4,
    8,
    32,
    4096,
    8192,
    16384,
)
_MS_PRIVATE = 1 << 18
(
    _PR_SET_PDEATHSIG,
    _PR_SET_SECCOMP,
    _PR_CAPBSET_DROP,
    _PR_SET_CHILD_SUBREAPER,
    _PR_SET_NO_NEW_PRIVS,
) = 1, 22, 24, 36, 38
_SECCOMP_MODE_FILTER = 2
_LAST_CAPABILITY = 63
"""Capabilities are a 64-bit set (capabilities(7)); dropping one unknown to the kernel fails
harmlessly."""

_KEPT_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 18, 31)
"""CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SYS_CHROOT, SETFCAP: required to
install packages (capabilities(7))."""
_NODES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = {
    "fd": "/proc/self/fd",
    "ptmx": "pts/ptmx",
    **{name: f"/proc/self/fd/{n}" for n, name in enumerate(("stdin", "stdout", "stderr"))},
}
_MAX_PTYS = 32  # `snapshotter.shim.sandbox.root_directory.MAX_PTYS`
_PLACES = ("dev", "etc", "proc", "run", "tmp")
"""Directories that the root file system of an image must have, because something is mounted at or
below them."""

_SHARED = ("/run/lock",)
"""World-writable directories of the host, which are read-only in the sandbox."""
_SHOWN = (*_PLACES, "bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "nix", "sys")
"""Directories in the machine's root that commands without a root file system of their own see."""

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Execute the order on stdin; never returns."""
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
    """Enter the build's cgroup (writing "0" means the writing process, cgroups(7)) and lower the
    rlimits, while still privileged."""
    for procs in order.get("procs", ()):
        with open(procs, "w") as group:
            group.write("0")
    for name, most in order.get("limits", {}).items():
        _, hard = resource.getrlimit(getattr(resource, name))
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(getattr(resource, name), (bound, bound))


def _install(program: bytes) -> None:
    """Install a seccomp filter, as `isolation.install_filter` does, which this interpreter cannot
    import."""
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
        # import nothing after this point: all files will be the tenant's
        sys.path.clear()
        sys.meta_path.clear()
        _start_first_process()
        _pivot(order["rootfs"], order["lent"], order["ids"][0])
        _start_command(ids=order["ids"])
        _become_root_of_namespace()
        return
    os.makedirs(order["root"], exist_ok=True)
    if order["links"]:
        _change_root(order["root"], order["links"])
    _mount("tmpfs", order["root"], "tmpfs", _MS_NOSUID | _MS_NODEV, "size=64k,mode=755")
    _bind_all(order["binds"], "")
    _hide_machine(order["lent"])
    if order["resolver"] is not None and os.path.exists("/etc/resolv.conf"):
        _mount(order["resolver"], os.path.realpath("/etc/resolv.conf"), None, _MS_BIND)
    for hidden in filter(os.path.isfile, order["hidden"]):
        _mount("/dev/null", os.path.realpath(hidden), None, _MS_BIND)
    devices = f"{order['root']}/dev"
    os.mkdir(devices)
    _make_devices(devices)
    _mount(devices, "/dev", None, _MS_MOVE)
    os.rmdir(devices)
    _mount("/tmp", "/dev/shm", None, _MS_BIND)
    for shared in filter(os.path.isdir, _SHARED):
        _mount(shared, shared, None, _MS_BIND)
        _mount(None, shared, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    _start_first_process()
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV)
    _hide_drivers("/proc")
    _start_command()
    for capability in range(_LAST_CAPABILITY + 1):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    os.setgroups([])
    os.setresgid(order["uid"], order["uid"], order["uid"])
    os.setresuid(order["uid"], order["uid"], order["uid"])


def _change_root(at: str, links: dict[str, str]) -> None:
    """Enter a root directory with everything that the machine's has, and these links, by name, as
    slots have them, which leaves the machine's own as it is. It is mounted at `at` meanwhile."""
    _mount("tmpfs", at, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=64k,mode=755")
    own = at.split("/")[1]
    # first the directory that has `at`: its copy includes what is mounted at `at` so far
    for name in sorted(os.listdir("/"), key=lambda one: one != own):
        source, target = f"/{name}", f"{at}/{name}"
        if name in links:
            continue
        if os.path.islink(source):
            os.symlink(os.readlink(source), target)
            continue
        if os.path.isdir(source):
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o444))
        _mount(source, target, None, _MS_BIND | _MS_REC)
    for name, place in links.items():
        os.symlink(place, f"{at}/{name}")
    _pivot_to(at)
    _detach_former_root()


def _pivot_to(at: str) -> None:
    """Make the mount point `at` the root directory; the former one stays mounted on top of it until
    `umount2` at the working directory (pivot_root(2), "pivot_root('.', '.')")."""
    os.chdir(at)
    number = {"x86_64": 155, "aarch64": 41}[os.uname().machine]
    if _libc.syscall(number, b".", b".") != 0:
        raise OSError(ctypes.get_errno(), "pivot_root")


def _detach_former_root() -> None:
    _call("umount2", b".", _MNT_DETACH)
    os.chdir("/")


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
    """Mount everything below the image's root file system. No step runs meanwhile; files left by
    earlier steps are checked, not followed."""
    at, first = order["rootfs"], order["ids"][0]
    for name in _PLACES:
        if not os.path.isdir(f"{at}/{name}") or os.path.islink(f"{at}/{name}"):
            _give_up(f"/{name} of the image is not a directory: an earlier step removed it")
    _mount(at, at, None, _MS_BIND)
    size = f"size=64m,mode=755,uid={first},gid={first}"
    _mount("tmpfs", f"{at}/run", "tmpfs", _MS_NOSUID | _MS_NODEV, size)
    os.makedirs(f"{at}{order['root']}")
    _bind_all(order["binds"], at)
    _make_devices(f"{at}/dev")
    _mount("tmpfs", f"{at}/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777")
    resolver = f"{at}/etc/resolv.conf"
    if os.path.islink(resolver) or not os.path.isfile(resolver):
        if os.path.lexists(resolver):
            os.unlink(resolver)
        os.close(os.open(resolver, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        os.chown(resolver, first, first)
    _mount(order["resolver"] or os.path.realpath("/etc/resolv.conf"), resolver, None, _MS_BIND)


def _make_devices(at: str) -> None:
    """Mount the standard devices on the directory `at`, and no others."""
    _mount("tmpfs", at, "tmpfs", _MS_NOSUID, "size=64k,mode=755")
    for name in _NODES:
        os.close(os.open(f"{at}/{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o444))
        _mount(f"/dev/{name}", f"{at}/{name}", None, _MS_BIND)
    for name, target in _LINKS.items():
        os.symlink(target, f"{at}/{name}")
    for name in ("pts", "shm"):
        os.mkdir(f"{at}/{name}")
    terminals = f"newinstance,ptmxmode=0666,mode=0620,max={_MAX_PTYS}"
    _mount("devpts", f"{at}/pts", "devpts", _MS_NOSUID | _MS_NOEXEC, terminals)


def _hide_drivers(proc: str) -> None:
    """Cover the machine's drivers' files, which name its GPUs, in a procfs."""
    if os.path.isdir(f"{proc}/driver"):
        flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
        _mount("tmpfs", f"{proc}/driver", "tmpfs", flags, "size=4k,mode=755")


def _pivot(at: str, lent: list[str], owner: int) -> None:
    """Enter the root file system; runs in the first process of the sandbox.

    `lent`: directories of the machine that are visible in it. They are mounted after the pivot,
    when links can only lead into the image."""
    held = _hold(lent)
    _mount("proc", f"{at}/proc", "proc", _MS_NOSUID | _MS_NODEV)
    _hide_drivers(f"{at}/proc")
    _pivot_to(at)
    _show(held, owner)
    _detach_former_root()


def _hide_machine(lent: list[str]) -> None:
    """Cover the machine's directories except _SHOWN; those lent stay."""
    held = _hold([path for path in lent if path.split("/")[1] not in _SHOWN])
    for name in os.listdir("/"):
        if name not in _SHOWN and os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}"):
            _mount("tmpfs", f"/{name}", "tmpfs", _MS_NOSUID | _MS_NODEV, "size=64k,mode=755")
    _show(held, 0)


def _hold(paths: list[str]) -> list[tuple[str, int]]:
    return [(path, os.open(path, os.O_PATH | os.O_DIRECTORY)) for path in paths]


def _show(held: list[tuple[str, int]], owner: int) -> None:
    for path, source in held:
        _make_directories(path, owner)
        _mount(f"/proc/self/fd/{source}", path, None, _MS_BIND)
        _mount(None, path, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
        os.close(source)


def _make_directories(path: str, owner: int) -> None:
    parts = path.split("/")
    for i in range(2, len(parts) + 1):
        directory = "/".join(parts[:i])
        if not os.path.lexists(directory):
            os.mkdir(directory, 0o755)
            os.chown(directory, owner, owner, follow_symlinks=False)


def _become_root_of_namespace() -> None:
    """Become root of a user namespace whose ids the first process of the sandbox has mapped, with
    few of root's capabilities even there."""
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
    kills the sandbox on SIGTERM.

    waitpid(2) for a PID 1 returns after every process of its namespace has exited
    (pid_namespaces(7)).
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
    """Fork the process that becomes the command. The parent stays as PID 1, reaps orphans, and
    exits with the command.

    `ids`: first id and number of ids of the command's user namespace.
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
        if os.read(made[0], 1):  # otherwise the child failed and has printed why
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
    SIGTERM, it kills all remaining descendants."""
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
    """Kill the direct children. Their own children are reparented to this process and killed when
    SIGCHLD arrives."""
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
        os._exit(1)  # the parent died before it could be watched


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
