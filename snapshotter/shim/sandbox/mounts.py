"""Namespaces of a slot, and the tree at `/run/pilotlight/slot` with the same paths on every node.

Read-only binds (interpreter, packages, code, weights), and one writable tmpfs at `/run` (it
contains the work directory, /tmp and similar), in a separate root directory (`root_directory`).
Runs in the shim, as root. Sources: mount(2), unshare(2), mount_namespaces(7).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import stat
from collections.abc import Container, Mapping, Sequence

from snapshotter.shim.sandbox import root_directory
from snapshotter.shim.sandbox.mount import (
    BIND,
    NODEV,
    NOEXEC,
    NOSUID,
    PRIVATE,
    RDONLY,
    REC,
    REMOUNT,
    mount,
)

ROOT = "/run/pilotlight/slot"
FIRST_PID = 1000
"""Pids of workers are above this number, so that those of an image never collide with the shim or
with CRIU."""
HOME = f"{ROOT}/work"
PROGRAMS = f"{ROOT}/bin"
PYTHONS = ("python", "python3")
"""Names in PROGRAMS of the slot's interpreter."""
DRIVER = f"{ROOT}/driver"
"""Libraries of the GPU driver, in the root file system of an image."""
CONTROL = f"{ROOT}/control.sock"
"""Socket of a process quiesced for a snapshot, to which its next shim connects."""

_RUN, _SHARED = "/run", ("/tmp", "/var/tmp")
"""Writable directories of a slot, in addition to /dev/shm."""
_KDAT = "/run/criu.kdat"
"""CRIU's cache of kernel features; it accepts the file only on a tmpfs."""

_is_image = False

_DRIVER_LIBRARIES = tuple(
    f"{directory}/lib{name}*.so*"
    for directory in (
        "/usr/lib/*-linux-gnu",
        "/usr/lib/*-linux-gnu/nvidia/current",
        "/usr/lib64",
        "/usr/local/nvidia/lib64",
        "/usr/local/lib",
    )
    for name in ("cuda", "nvidia-", "nvcuvid", "nvoptix")
)

_NEWNS, _NEWUTS, _NEWIPC, _NEWPID = 0x00020000, 0x04000000, 0x08000000, 0x20000000
_libc = ctypes.CDLL(None, use_errno=True)


def unshare() -> None:
    """Create mount, UTS and IPC namespaces for this process, and a PID namespace for its next
    child. Raises OSError."""
    if _libc.unshare(_NEWNS | _NEWUTS | _NEWIPC | _NEWPID) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"unshare: {os.strerror(code)}")
    mount(None, "/", None, REC | PRIVATE)


def enter_as_init() -> None:
    """Mount /proc of the new PID namespace; first step of PID 1. Raises OSError."""
    mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)


def reserve_low_pids() -> None:
    """Make the next process get a pid above FIRST_PID. Raises OSError."""
    with open("/proc/sys/kernel/ns_last_pid", "w") as f:
        f.write(str(FIRST_PID))


def other_processes(known: Container[int]) -> list[str]:
    """Names of the live processes of this PID namespace, except those in `known`."""
    names = []
    for pid in [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]:
        with contextlib.suppress(OSError):  # it has exited
            with open(f"/proc/{pid}/stat") as f:
                name, _, rest = f.read().partition("(")[2].rpartition(")")
            if pid not in known and rest.split()[0] not in "ZX":
                names.append(name)
    return names


def children() -> list[int]:
    """Pids of this process's children."""
    with open(f"/proc/self/task/{os.getpid()}/children") as f:
        return [int(pid) for pid in f.read().split()]


def prepare(directory: str) -> str:
    """Begin the slot's root directory below its directory, and return its path; `build` completes
    it. Raises OSError."""
    at = f"{directory}/root"
    os.mkdir(at, 0o700)
    root_directory.prepare(at)
    for shared in (_RUN, *_SHARED):
        os.makedirs(f"{at}{shared}", exist_ok=True)
    return at


def build(
    at: str,
    binds: Sequence[tuple[str, str]],
    *,
    uid: int,
    writable_bytes: int,
    devices: Sequence[tuple[str, str]] = (),
    driver_files: Sequence[tuple[str, str]] = (),
    rootfs: str = "",
    volumes: Sequence[tuple[str, str]] = (),
    links: Mapping[str, str] | None = None,
    python: str = "",
) -> None:
    """Mount the tree in the root `at`, and enter it. `binds`: (host path, path below ROOT);
    `devices`, `driver_files`: as in `root_directory.finish`; `rootfs`: of the image, "" = the
    host's; `volumes`: (host path, path in the slot), writable; `links`: names in the machine's root
    → paths below ROOT that they lead to; `python`: the interpreter in the slot, "" = none.

    Afterwards only the binds and the contents of `root_directory` are visible of the host; open
    descriptors remain valid. Raises OSError.
    """
    global _is_image
    _is_image = bool(rootfs)
    if rootfs:
        at = root_directory.show_image(at, rootfs)
    else:
        root_directory.write_names(at, uid=uid, home=HOME)
        root_directory.write_links(at, {root_directory.HOME: HOME, **(links or {})})
    own = f"{at}{ROOT}"
    root_directory.finish(
        at, devices=devices, driver_files=driver_files, shared_bytes=writable_bytes
    )
    mount("tmpfs", f"{at}{_RUN}", "tmpfs", NOSUID | NODEV, f"size={writable_bytes},mode=755")
    os.makedirs(own)
    for source, name in binds:
        with contextlib.ExitStack() as stack:
            _bind(_hold(source, stack, follow=not _is_tenants(name)), f"{own}/{_below_root(name)}")
    if rootfs and devices:
        _show_driver(f"{at}{DRIVER}")
    for name, mode in (("work", 0o700), ("tmp", 0o1777)):
        os.mkdir(f"{own}/{name}")
        os.chmod(f"{own}/{name}", mode)
    os.chown(f"{own}/work", uid, uid)
    if python:
        link_python(python, at)
    os.symlink(f"{ROOT}/tmp", f"{at}{_RUN}/lock")
    for shared in _SHARED:
        mount(f"{own}/tmp", f"{at}{shared}", None, BIND)
    for source, path in volumes:
        _mount_volume(at, source, path)
    root_directory.enter(at)


def link_python(python: str, at: str = "") -> None:
    """Make the interpreter's names in PROGRAMS, below the root `at`. Raises OSError."""
    os.mkdir(f"{at}{PROGRAMS}")
    for name in PYTHONS:
        os.symlink(python, f"{at}{PROGRAMS}/{name}")


def _mount_volume(at: str, source: str, path: str) -> None:
    """Mount a volume's directory at `path` of the root `at`, writable. The root may be an image's,
    whose files are a tenant's: each part is opened below the one before, and no link is followed.
    Raises OSError."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.ExitStack() as stack:

        def opened(name: str, folder: int | None = None) -> int:
            fd = os.open(name, flags, dir_fd=folder)
            stack.callback(os.close, fd)
            return fd

        held, target = opened(source), opened(at)
        for part in path.strip("/").split("/"):
            if part in ("", ".", ".."):
                raise OSError(errno.EINVAL, f"{path!r} is no path for a volume")
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=target)
                target = opened(part, target)
            except OSError as e:
                raise OSError(
                    e.errno, f"a volume cannot be mounted at {path}: {part}: {e.strerror}"
                ) from e
        mounted = f"/proc/self/fd/{target}"
        mount(f"/proc/self/fd/{held}", mounted, None, BIND)
        # the descriptor is of the directory below the mount: its path leads to what covers it
        below = os.readlink(mounted)
        mount(None, below, None, BIND | REMOUNT | NOSUID | NODEV)


def is_image() -> bool:
    """Whether the slot's root is an image's: its programs and libraries are a tenant's, and root
    must not execute them."""
    return _is_image


def write_criu_kdat(fd: int) -> None:
    """Install CRIU's cache of kernel features; ignored if empty. Raises OSError."""
    with open(fd, "rb", closefd=False) as source:
        kdat = source.read()
    if kdat:
        with open(_KDAT, "wb") as target:
            target.write(kdat)


def _is_tenants(name: str) -> bool:
    """Whether the source of that bind contains a tenant's files: packages, code, weights."""
    return name.partition("/")[0] in ("env", "code", "weights")


def _below_root(name: str) -> str:
    if name.startswith("/") or ".." in name.split("/"):
        raise OSError(errno.EXDEV, f"{name!r} is outside the slot's tree")
    return name


def _hold(path: str, stack: contextlib.ExitStack, *, follow: bool = True) -> str:
    """A path of `path` that remains valid when something is mounted over it. Raises OSError for a
    symbolic link if `follow` is false."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    stack.callback(os.close, fd)
    if stat.S_ISLNK(os.fstat(fd).st_mode):
        raise OSError(errno.ELOOP, f"{path} is a symbolic link and cannot be mounted in a slot")
    return f"/proc/self/fd/{fd}"


def _show_driver(directory: str) -> None:
    """Mount the libraries of the machine's GPU driver: they must match its kernel module, and an
    image's packages have none, or others."""
    os.makedirs(directory)
    for path in driver_libraries():
        target = f"{directory}/{os.path.basename(path)}"
        if os.path.lexists(target):
            continue
        if os.path.islink(path):
            os.symlink(os.path.basename(os.readlink(path)), target)
        elif os.path.isfile(path):
            _bind(path, target)


def driver_libraries() -> list[str]:
    """The files of the machine's GPU driver libraries, links to them included."""
    return sorted({path for pattern in _DRIVER_LIBRARIES for path in glob.glob(pattern)})


def _bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o444))
    mount(source, target, None, BIND)
    mount(None, target, None, BIND | REMOUNT | RDONLY | NOSUID | NODEV)
