"""Moves mounts from our mount namespace to a pod's: open_tree(2) in ours, setns(2), move_mount(2)
in the pod's.

The source of a bind mount must be in the caller's namespace, but a detached copy, made before
entering, need not be. Runs in the process that enters pods, as root; standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterable, Sequence

from snapshotter.shim.sandbox import mounts, system_calls
from snapshotter.shim.sandbox.mount import (
    BIND,
    NODEV,
    NOSUID,
    PRIVATE,
    RDONLY,
    REC,
    REMOUNT,
    mount,
    restrict_detached,
)
from snapshotter.shim.sandbox.root_directory import PROGRAMS

_OPEN_TREE, _MOVE_MOUNT = 428, 429  # the same on every architecture (asm-generic/unistd.h)
_AT_FDCWD = -100
_CLONE, _CLOEXEC, _RECURSIVE = 1, os.O_CLOEXEC, 0x8000
_EMPTY_PATH = 0x4
"""MOVE_MOUNT_F_EMPTY_PATH: use the descriptor itself."""
_EMPTY_TARGET = 0x40
"""MOVE_MOUNT_T_EMPTY_PATH."""
_AT_EMPTY_PATH = 0x1000
_DETACH = 2
_MOUNTS = 0x00020000
_OF_THE_POD = ("/dev", "/proc", "/sys")
_FILES_OF_THE_POD = ("resolv.conf", "hosts", "hostname")
"""Of /etc: the kubelet's."""
NAMESPACES = 0x00020000 | 0x08000000 | 0x04000000 | 0x40000000 | 0x20000000
"""Mount, IPC, UTS, network, and PID for the next child."""
_libc = ctypes.CDLL(None, use_errno=True)


def detach(path: str) -> int:
    """A descriptor of a detached copy of `path`. Raises OSError."""
    fd: int = _libc.syscall(_OPEN_TREE, _AT_FDCWD, path.encode(), _CLONE | _CLOEXEC | _RECURSIVE)
    return _check(fd, f"open_tree {path}")


def put(fd: int, target: str) -> None:
    """Attach it read-only at `target`, which is created. Takes ownership of `fd`. Raises
    OSError."""
    try:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o444))
        _check(
            _libc.syscall(_MOVE_MOUNT, fd, b"", _AT_FDCWD, target.encode(), _EMPTY_PATH),
            f"move_mount to {target}",
        )
    finally:
        os.close(fd)
    mount(None, target, None, BIND | REMOUNT | RDONLY | NOSUID | NODEV)


def show(pidfd: int, source: str, target: str, *, over: tuple[int, int]) -> None:
    """Mount the directory `source` of our namespace in that of the process of `pidfd`, read-only
    from its first moment, over the directory `over` (device, inode), which it has at `target`. No
    effect if it is there. Raises OSError.

    Enters the mount namespace of the process, for good.
    """
    tree = detach(source)
    try:
        restrict_detached(tree, RDONLY | NOSUID | NODEV)
        _check(_libc.setns(pidfd, _MOUNTS), "setns into the pod")
        place = os.open(target, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(place)
            if os.path.samestat(found, os.fstat(tree)):
                return
            if (found.st_dev, found.st_ino) != over:
                raise OSError(errno.EXDEV, f"{target} in the pod is another directory")
            flags = _EMPTY_PATH | _EMPTY_TARGET
            moved: int = _libc.syscall(_MOVE_MOUNT, tree, b"", place, b"", flags)
            _check(moved, f"move_mount to {target}")
        finally:
            os.close(place)
    finally:
        os.close(tree)


def detach_programs() -> list[tuple[int, str]]:
    """Detached copies, read-only, of our directories of programs and libraries, with their paths.
    Raises OSError."""
    taken = []
    for path in PROGRAMS:
        if os.path.isdir(path) and not os.path.islink(path):
            taken.append((detach(path), path))
            restrict_detached(taken[-1][0], RDONLY | NOSUID | NODEV)
    return taken


def cover(held: Sequence[tuple[int, str]]) -> None:
    """Mount each of `detach_programs` over the pod's own directory of that name, in a mount
    namespace of our own: the pod's stays as it is. Takes ownership of the descriptors. Raises
    OSError."""
    _check(_libc.unshare(_MOUNTS), "unshare")
    mount(None, "/", None, PRIVATE | REC)
    for fd, path in held:
        try:
            place = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as e:
            raise OSError(
                e.errno,
                f"{path} is no directory in this pod's image ({e.strerror}): cannot restore into "
                "it",
            ) from e
        try:
            flags = _EMPTY_PATH | _EMPTY_TARGET
            moved: int = _libc.syscall(_MOVE_MOUNT, fd, b"", place, b"", flags)
            _check(moved, f"move_mount to {path}")
        finally:
            os.close(place)
            os.close(fd)


def detach_rootfs(path: str) -> int:
    """A detached copy, read-only from its first moment, of an image's root file system. Raises
    OSError."""
    tree = detach(path)
    restrict_detached(tree, RDONLY | NOSUID | NODEV)
    return tree


def change_root(tree: int, *, directories: Sequence[str]) -> None:
    """Make `tree` (`detach_rootfs`) the root directory, in a mount namespace of our own, which the
    pod's other processes are not in, with the pod's own devices, processes, name servers, and
    `directories`. Takes ownership of `tree`. Raises OSError.

    The tree is a tenant's, and so may the pod's image be: a mount point, or what is mounted there,
    that is a link is refused.
    """
    _check(_libc.unshare(_MOUNTS), "unshare")
    mount(None, "/", None, PRIVATE | REC)
    held = _present((name, _detach_directory(name)) for name in (*_OF_THE_POD, *directories))
    files = _present((name, _detach_file(name)) for name in _FILES_OF_THE_POD)
    try:
        place = os.open("/run", os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        _attach(tree, place, "/run")
        # what is found by a path is what was there before: the mount itself is the descriptor
        os.fchdir(tree)
        for name, fd in held:
            target = _open_below(tree, name.lstrip("/").split("/"))
            _attach(fd, target, f"{name} of the image")
        etc = _open_below(tree, ["etc"])
        try:
            for name, fd in files:
                if (place_of_file := _open_file(name, etc)) is not None:
                    _attach(fd, place_of_file, f"/etc/{name} of the image")
        finally:
            os.close(etc)
        number = system_calls.numbers(system_calls.DENIED, os.uname().machine)["pivot_root"]
        _check(_libc.syscall(number, b".", b"."), "pivot_root to the image")
        _check(_libc.umount2(b".", _DETACH), "umount of the pod's root")
        os.chdir("/")
    finally:
        os.close(tree)
        for _, fd in (*held, *files):
            os.close(fd)


def _present(taken: Iterable[tuple[str, int | None]]) -> list[tuple[str, int]]:
    return [(name, fd) for name, fd in taken if fd is not None]


def _attach(tree: int, place: int, name: str) -> None:
    """Mount a detached tree; takes ownership of `place`."""
    try:
        moved: int = _libc.syscall(_MOVE_MOUNT, tree, b"", place, b"", _EMPTY_PATH | _EMPTY_TARGET)
        _check(moved, f"move_mount to {name}")
    finally:
        os.close(place)


def _detach_directory(path: str) -> int | None:
    """A detached copy of a directory of the pod, with what is mounted below it; None if there is
    none."""
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = _open_below(root, path.lstrip("/").split("/"))
    except FileNotFoundError:
        return None
    finally:
        os.close(root)
    return _detach_opened(found, path)


def _detach_file(name: str) -> int | None:
    """A detached copy of a file of the pod's /etc; None if there is none."""
    try:
        etc = os.open("/etc", os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        found = _open_file(name, etc)
    finally:
        os.close(etc)
    return _detach_opened(found, f"/etc/{name}") if found is not None else None


def _detach_opened(fd: int, name: str) -> int:
    flags = _CLONE | _CLOEXEC | _RECURSIVE | _AT_EMPTY_PATH
    try:
        tree: int = _libc.syscall(_OPEN_TREE, fd, b"", flags)
        return _check(tree, f"open_tree {name}")
    finally:
        os.close(fd)


def _open_below(folder: int, parts: Sequence[str]) -> int:
    """A descriptor of a directory, none of whose parts is a link. Raises OSError."""
    at = os.dup(folder)
    try:
        for part in parts:
            below = os.open(
                part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at
            )
            os.close(at)
            at = below
    except OSError as e:
        os.close(at)
        raise OSError(e.errno, f"/{'/'.join(parts)}: {os.strerror(e.errno or 0)}") from e
    return at


def _open_file(name: str, folder: int) -> int | None:
    """A descriptor of a regular file; None for anything else, links included."""
    try:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


def enter(pidfd: int) -> None:
    """Enter the namespaces of the process of `pidfd`, all at once; the next child is in its PID
    namespace. Raises OSError."""
    _check(_libc.setns(pidfd, NAMESPACES), "setns into the pod")


def build(held: Sequence[tuple[int, str]], *, uid: int, writable_bytes: int, python: str) -> None:
    """Build the tree of a slot (`snapshotter.shim.sandbox.mounts`) in a pod, with the paths that a
    restored worker expects. Raises OSError.

    `held`: (descriptor of `detach`, name below the tree's root). `writable_bytes`: size of each of
    its temporary file systems. `python`: the interpreter in the tree.
    """
    require_places()
    options = f"size={writable_bytes}"
    mount("tmpfs", "/run", "tmpfs", NOSUID | NODEV, f"{options},mode=755")
    for fd, name in held:
        put(fd, f"{mounts.ROOT}/{name}")
    os.makedirs(mounts.ROOT, exist_ok=True)
    for name, mode in (("work", 0o700), ("tmp", 0o1777)):
        os.mkdir(f"{mounts.ROOT}/{name}")
        os.chmod(f"{mounts.ROOT}/{name}", mode)
    os.chown(f"{mounts.ROOT}/work", uid, uid)
    mounts.link_python(python)
    os.symlink(f"{mounts.ROOT}/tmp", "/run/lock")
    mount("tmpfs", "/dev/shm", "tmpfs", NOSUID | NODEV, f"{options},mode=1777")
    for shared in ("/tmp", "/var/tmp"):
        if os.path.isdir(shared):
            mount(f"{mounts.ROOT}/tmp", shared, None, BIND)


def require_places(root: str = "/") -> None:
    """Raises OSError if a mount point of `build` is a symbolic link.

    The image is the tenant's. A link could be redirected between our mount and the start of CRIU,
    which runs as root.
    """
    for place in ("run", "dev/shm", "tmp", "var/tmp"):
        path = os.path.join(root, place)
        if os.path.realpath(path) != os.path.join(os.path.realpath(root), place):
            raise OSError(
                errno.ELOOP,
                f"{path} is a symbolic link in this pod's image: cannot restore into it",
            )


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result
