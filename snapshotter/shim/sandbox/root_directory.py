"""The root directory of a slot: programs and libraries of the host, read-only, and nothing else.

    /usr, /bin, /sbin, /lib*   the host's (symbolic links are copied)
    /etc                       separate users, hosts and resolver; of the host certificates, files of the dynamic linker, alternatives
    /dev                       null, zero, full, random, urandom, tty, pts and shm; the slot's GPUs
    /sys                       the machine's processors and memory, read-only; all of it with a GPU
    /proc, /run, /tmp          separate; in /proc/driver only what belongs to the slot's GPUs

An image that installs Debian packages has its own root file system instead (`base_rootfs`), mounted
as a whole and read-only, with the same /dev, /sys, /proc, /run and /tmp. Its files are the
tenant's: nothing that runs as root in the slot loads one of them, so no module is imported after
the root was entered, and CRIU comes with the machine's own libraries (`criu.bundle`).

The root is assembled below a directory of the slot, while the host's files are still reachable:
most of it when the slot is made (`prepare`), launch-specific parts when a launch arrives
(`finish`), and it is entered last (`enter`). Runs in the shim, as root; standard library only.
Sources: pivot_root(2), mount(2), hier(7), devpts (kernel documentation, filesystems/devpts)."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Mapping, Sequence

from snapshotter.shim.sandbox import isolation, system_calls
from snapshotter.shim.sandbox.mount import (
    BIND,
    MOVE,
    NODEV,
    NOEXEC,
    NOSUID,
    RDONLY,
    REMOUNT,
    bind_tree,
    mount,
)

PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
"""The host's directories of programs and libraries, which a slot shows."""
_ETC = frozenset(
    {
        "alternatives",
        "ca-certificates",
        "crypto-policies",
        "fonts",
        "ghostscript",
        "glvnd",
        "ld.so.cache",
        "ld.so.conf",
        "ld.so.conf.d",
        "libreoffice",
        "localtime",
        "magic",
        "mime.types",
        "OpenCL",
        "perl",
        "protocols",
        "R",
        "services",
        "texmf",
        "timezone",
        "vulkan",
    }
)
_ETC_BEGINS = ("ImageMagick-", "java-", "python3")
_ETC_PARTS = ("/etc/pki/ca-trust", "/etc/pki/tls", "/etc/ssl/certs", "/etc/ssl/openssl.cnf")
"""Files of the host, if they exist: settings that its programs and libraries require."""
MAX_PTYS = 32
"""Pseudo-terminals of one slot: the whole machine has `kernel.pty.max` (4,096)."""
_NODES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}
_MACHINE = "/sys/devices/system"
"""Processors and memory nodes, which numeric libraries count to size their thread pools."""
_RESOLVER = "/etc/resolv.conf"
_DRIVERS = "/proc/driver"
"""Files of the machine's drivers, which every procfs shows; those of NVIDIA's name all GPUs."""
_PARAMETERS = "nvidia/params"
_NO_NODES = "ModifyDeviceFiles: 0"
"""Parameter by which CUDA learns that it cannot make device nodes (libnvidia-container)."""
_MOUNTED = (
    "dev",
    "etc",
    "proc",
    "run",
    "sys",
    "sys/devices",
    _MACHINE[1:],
    "tmp",
    "var",
    "var/tmp",
)
"""Directories that the root file system of an image must have."""
_MOST_NAMES = 1024**2
"""Limit of an image's /etc/passwd, in characters."""
_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)
HOME = "root"
"""The working directory, for programs that name it `/root`."""


def prepare(at: str) -> None:
    """Mount a root on the directory `at`, with all launch-independent parts. Raises OSError."""
    mount("tmpfs", at, "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
    for path in PROGRAMS:
        _show(path, at)
    _make_etc(at)
    _make_dev(at)
    _make_directory(f"{at}/proc")
    mount("proc", f"{at}/proc", "proc", NOSUID | NODEV | NOEXEC)
    _show(_MACHINE, at)
    _make_directory(f"{at}/var")
    os.symlink("/run", f"{at}/var/run")


def show_image(at: str, rootfs: str) -> str:
    """Replace the machine's programs by an image's root file system; returns the new path of the
    root. Raises OSError.

    `rootfs`: prepared by `complete`, and writable by root only.
    """
    own = f"{os.path.dirname(at)}/rootfs"
    _make_directory(own)
    mount(rootfs, own, None, BIND)
    for name in ("dev", "proc", _MACHINE[1:]):
        if os.path.ismount(f"{at}/{name}"):
            mount(f"{at}/{name}", f"{own}/{name}", None, MOVE)
    if os.path.exists(f"{at}{_RESOLVER}"):
        mount(f"{at}{_RESOLVER}", f"{own}{_RESOLVER}", None, BIND)
    return own


def complete(rootfs: str, *, uid: int | None, home: str = "") -> None:
    """Prepare an image's root file system for `show_image`: all mount points must be directories.
    Blocking. `uid`: of the function, which gets a name and the directory `home`; None: of several
    functions, none of which has a name.

    Raises ValueError that names a mount point that the image's steps replaced, OSError.
    """
    for name in _MOUNTED:
        path = f"{rootfs}/{name}"
        if not os.path.lexists(path):
            _make_directory(path)
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise ValueError(f"/{name} is not a directory: a step of the image replaced it")
    for path in (f"{rootfs}/etc/ld.so.preload", f"{rootfs}{_RESOLVER}"):
        if os.path.lexists(path):
            os.unlink(path)
    _write(f"{rootfs}{_RESOLVER}", [])
    if uid is None:
        return
    _append(f"{rootfs}/etc/passwd", f"function:x:{uid}:{uid}:function:{home}:/bin/sh")
    _append(f"{rootfs}/etc/group", f"function:x:{uid}:")


def _append(path: str, line: str) -> None:
    """Append a line to a file of the tenant, without following links."""
    lines: list[str] = []
    if os.path.lexists(path):
        if stat.S_ISREG(os.lstat(path).st_mode):
            with open(path, errors="replace") as f:
                lines = f.read(_MOST_NAMES).splitlines()
        os.unlink(path)
    _write(path, [*lines, line])


def write_names(at: str, *, uid: int, home: str) -> None:
    """Write the function's user and group, if the root is the machine's. Raises OSError."""
    names = ["root:x:0:0:root:/:/bin/sh", "nobody:x:65534:65534:nobody:/:/usr/sbin/nologin"]
    groups = ["root:x:0:", "tty:x:5:", "nogroup:x:65534:"]
    if uid:
        names.append(f"function:x:{uid}:{uid}:function:{home}:/bin/sh")
        groups.append(f"function:x:{uid}:")
    _write(f"{at}/etc/passwd", names)
    _write(f"{at}/etc/group", groups)


def write_links(at: str, links: Mapping[str, str]) -> None:
    """Make links in the root that is the machine's, from names that nothing has there. They are
    resolved by the processes of the slot, in its root. Raises OSError."""
    for name, target in links.items():
        if "/" in name or name.startswith("."):
            raise OSError(errno.EINVAL, f"{name!r} is not the name of a directory")
        os.symlink(target, f"{at}/{name}")


def finish(
    at: str,
    *,
    devices: Sequence[tuple[str, str]],
    driver_files: Sequence[tuple[str, str]],
    shared_bytes: int,
) -> None:
    """Add launch-specific parts: GPUs, and the size of /dev/shm. Raises OSError.

    `devices`: (host path of a node, name in /dev); `driver_files`: (host path, name in
    /proc/driver). All other device nodes and files of drivers are hidden.
    """
    for source, name in devices:
        target = f"{at}/dev/{name}"
        os.makedirs(os.path.dirname(target), exist_ok=True)
        _bind(source, target, is_directory=False, read_only=False)
    _hide_drivers(f"{at}{_DRIVERS}", driver_files)
    if devices:
        mount("/sys", f"{at}/sys", None, BIND)
        mount(None, f"{at}/sys", None, BIND | REMOUNT | RDONLY | NOSUID | NODEV)
    mount("tmpfs", f"{at}/dev/shm", "tmpfs", NOSUID | NODEV, f"size={shared_bytes},mode=1777")
    mount(None, f"{at}/dev", None, REMOUNT | BIND | RDONLY | NOSUID | NOEXEC)


def _hide_drivers(at: str, shown: Sequence[tuple[str, str]]) -> None:
    """Cover the directory of drivers' files with one that has the shown ones only."""
    if not os.path.isdir(at):
        return
    mount("tmpfs", at, "tmpfs", NOSUID | NODEV | NOEXEC, "size=64k,mode=755")
    for source, name in shown:
        target = f"{at}/{name}"
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if name == _PARAMETERS:
            with open(source) as f:
                lines = f.read().splitlines()
            name_of = _NO_NODES.partition(":")[0]
            _write(target, [_NO_NODES if line.startswith(name_of) else line for line in lines])
        else:
            _bind(source, target, is_directory=os.path.isdir(source))
    mount(None, at, None, REMOUNT | BIND | RDONLY | NOSUID | NODEV | NOEXEC)


def enter(at: str) -> None:
    """Make `at` the root, read-only, and unmount the host's. Disables imports from files. Raises
    OSError."""
    mount(None, at, None, REMOUNT | BIND | RDONLY | NOSUID | NODEV)
    os.chdir(at)
    machine = os.uname().machine
    number = (
        system_calls.numbers(system_calls.DENIED, machine)["pivot_root"]
        if machine in system_calls.MACHINES
        else -1
    )
    # afterwards the old root covers the new one
    _check(_libc.syscall(number, b".", b"."), f"pivot_root to {at}")
    _check(_libc.umount2(b".", _DETACH), "umount of the host's root")
    os.chdir("/")
    isolation.forbid_imports()


def _make_etc(at: str) -> None:
    _make_directory(f"{at}/etc")
    _write(f"{at}/etc/hosts", ["127.0.0.1 localhost", "::1 localhost ip6-localhost"])
    _write(f"{at}/etc/nsswitch.conf", ["passwd: files", "group: files", "hosts: files dns"])
    for name in os.listdir("/etc"):
        if name in _ETC or name.startswith(_ETC_BEGINS):
            _show(f"/etc/{name}", at)
    for path in _ETC_PARTS:
        _show(path, at)
    resolver = os.path.realpath(_RESOLVER)
    if os.path.isfile(resolver):
        _bind(resolver, f"{at}{_RESOLVER}", is_directory=False)


def _write(path: str, lines: list[str]) -> None:
    with open(path, "w") as f:
        f.write("\n".join(lines) + "\n")
    os.chmod(path, 0o644)


def _make_dev(at: str) -> None:
    dev = f"{at}/dev"
    _make_directory(dev)
    mount("tmpfs", dev, "tmpfs", NOSUID | NOEXEC, "size=64k,mode=755")
    for name in _NODES:
        _show(f"/dev/{name}", at, read_only=False)
    for name, target in _LINKS.items():
        os.symlink(target, f"{dev}/{name}")
    _make_directory(f"{dev}/pts")
    mount(
        "devpts",
        f"{dev}/pts",
        "devpts",
        NOSUID | NOEXEC,
        f"newinstance,ptmxmode=0666,mode=0620,gid=5,max={MAX_PTYS}",
    )
    _make_directory(f"{dev}/shm")


def _show(path: str, at: str, *, read_only: bool = True) -> None:
    """Mount `path` of the host under its name below `at`, or copy it if it is a symbolic link; no
    effect if it does not exist."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    target = f"{at}{path}"
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(path), target)
    else:
        _bind(path, target, is_directory=stat.S_ISDIR(status.st_mode), read_only=read_only)


def _bind(source: str, target: str, *, is_directory: bool, read_only: bool = True) -> None:
    if is_directory:
        _make_directory(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o444))
    # including submounts: containers get their GPU's libraries as mounts in /usr/lib
    if is_directory and read_only:
        bind_tree(source, target, RDONLY | NOSUID | NODEV)
        return
    mount(source, target, None, BIND)
    if read_only:
        mount(None, target, None, BIND | REMOUNT | RDONLY | NOSUID | NODEV)


def _make_directory(path: str) -> None:
    os.mkdir(path, 0o755)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
