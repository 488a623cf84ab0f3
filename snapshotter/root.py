"""The root directory of a slot: of the host its programs and libraries, read-only, and nothing else.

    /usr, /bin, /sbin, /lib*   the host's (links where they are links there)
    /etc                       users, hosts and resolver of its own; of the host certificates, what the dynamic linker needs, alternatives
    /dev                       null, zero, full, random, urandom, tty, pts and shm; GPUs for who asked for one
    /sys                       the machine's processors and memory, read-only; all of it for who asked for a GPU
    /proc, /run, /tmp          its own

It is put together below a tmpfs while the host's files can still be named, and entered last (`enter`). Runs in the shim, as root; standard
library only. Sources: pivot_root(2), mount(2), hier(7), devpts (kernel documentation, filesystems/devpts).
"""

from __future__ import annotations

import ctypes
import glob
import os
import stat

from snapshotter import isolation
from snapshotter.mount import BIND, NODEV, NOEXEC, NOSUID, RDONLY, REMOUNT, mount

_PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
_ETC = (
    "/etc/alternatives",
    "/etc/ca-certificates",
    "/etc/crypto-policies",
    "/etc/fonts",
    "/etc/ghostscript",
    "/etc/glvnd",
    "/etc/ImageMagick-*",
    "/etc/java-*",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/libreoffice",
    "/etc/localtime",
    "/etc/magic",
    "/etc/mime.types",
    "/etc/OpenCL",
    "/etc/perl",
    "/etc/pki/ca-trust",
    "/etc/pki/tls",
    "/etc/protocols",
    "/etc/python3*",
    "/etc/R",
    "/etc/services",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    "/etc/texmf",
    "/etc/timezone",
    "/etc/vulkan",
)
"""Of the host, where they are there: settings that its programs and libraries are installed with, and cannot do without."""
_NODES = ("null", "zero", "full", "random", "urandom", "tty")
_GPU_NODES = ("/dev/nvidia*", "/dev/dri", "/dev/kfd", "/dev/dxg")
_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx"}
_MACHINE = "/sys/devices/system"
"""Processors and memory nodes: what numeric libraries count before they make threads."""
_RESOLVER = "/etc/resolv.conf"
_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


def resolver() -> str:
    """The file that names the host's name servers, links followed; "" where there is none."""
    path = os.path.realpath(_RESOLVER)
    return path if os.path.isfile(path) else ""


def furnish(at: str, *, uid: int, home: str, resolver: str, gpu: bool, shared_bytes: int) -> None:
    """Put everything but /run and /tmp into the empty tmpfs `at`.

    resolver: a name for the file of name servers that is good now, "": none. shared_bytes: bound of /dev/shm. Raises OSError.
    """
    for path in _PROGRAMS:
        _show(path, at)
    _make_etc(at, uid=uid, home=home, resolver=resolver)
    _make_dev(at, gpu=gpu, shared_bytes=shared_bytes)
    _make_directory(f"{at}/proc")
    mount("proc", f"{at}/proc", "proc", NOSUID | NODEV | NOEXEC)
    _show("/sys" if gpu else _MACHINE, at)
    _make_directory(f"{at}/var")
    os.symlink("/run", f"{at}/var/run")


def enter(at: str) -> None:
    """Make `at` the root, read-only, and let go of the host's. Raises OSError."""
    mount(None, at, None, REMOUNT | BIND | RDONLY | NOSUID | NODEV)
    os.chdir(at)
    number = isolation.DENIED.get(os.uname().machine, {}).get("pivot_root", -1)
    _check(_libc.syscall(number, b".", b"."), f"pivot_root to {at}")  # the old root lies over the new one then
    _check(_libc.umount2(b".", _DETACH), "umount of the host's root")
    os.chdir("/")


def _make_etc(at: str, *, uid: int, home: str, resolver: str) -> None:
    _make_directory(f"{at}/etc")
    names = ["root:x:0:0:root:/:/bin/sh", "nobody:x:65534:65534:nobody:/:/usr/sbin/nologin"]
    groups = ["root:x:0:", "tty:x:5:", "nogroup:x:65534:"]
    if uid:
        names.append(f"function:x:{uid}:{uid}:function:{home}:/bin/sh")
        groups.append(f"function:x:{uid}:")
    files = {
        "passwd": names,
        "group": groups,
        "hosts": ["127.0.0.1 localhost", "::1 localhost ip6-localhost"],
        "nsswitch.conf": ["passwd: files", "group: files", "hosts: files dns"],
    }
    for name, lines in files.items():
        with open(f"{at}/etc/{name}", "w") as f:
            f.write("\n".join(lines) + "\n")
        os.chmod(f"{at}/etc/{name}", 0o644)
    for pattern in _ETC:
        for path in sorted(glob.glob(pattern)):
            _show(path, at)
    if resolver:
        _bind(resolver, f"{at}{_RESOLVER}", is_directory=False)


def _make_dev(at: str, *, gpu: bool, shared_bytes: int) -> None:
    dev = f"{at}/dev"
    _make_directory(dev)
    mount("tmpfs", dev, "tmpfs", NOSUID | NOEXEC, "size=64k,mode=755")
    nodes = [f"/dev/{name}" for name in _NODES]
    if gpu:
        nodes += [path for pattern in _GPU_NODES for path in sorted(glob.glob(pattern))]
    for path in nodes:
        _show(path, at, read_only=False)
    for name, target in _LINKS.items():
        os.symlink(target, f"{dev}/{name}")
    _make_directory(f"{dev}/pts")
    mount("devpts", f"{dev}/pts", "devpts", NOSUID | NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5")
    _make_directory(f"{dev}/shm")
    mount("tmpfs", f"{dev}/shm", "tmpfs", NOSUID | NODEV, f"size={shared_bytes},mode=1777")
    mount(None, dev, None, REMOUNT | BIND | RDONLY | NOSUID | NOEXEC)


def _show(path: str, at: str, *, read_only: bool = True) -> None:
    """Have `path` of the host under its name below `at`, a link as the link; nothing where there is none."""
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
    mount(source, target, None, BIND)
    if read_only:
        mount(None, target, None, BIND | REMOUNT | RDONLY | NOSUID | NODEV)


def _make_directory(path: str) -> None:
    os.mkdir(path, 0o755)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
