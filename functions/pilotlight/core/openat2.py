"""Opens files below a directory without leaving it and without following symbolic links:
openat2(2).

For trees written by others, possibly concurrently: between the check and the use of a path, a link
can replace a part of it; a descriptor cannot change. Standard library only."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from pathlib import Path, PurePosixPath

_SYS_OPENAT2 = 437
"""Equal on x86_64 and aarch64, as for all system calls since Linux 5.1."""
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x02, 0x04, 0x08
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_beneath(folder: int, name: str, flags: int = os.O_RDONLY) -> int:
    """Open `name`, a relative path below the open directory `folder`.

    Raises OSError: ELOOP if any part of it is a symbolic link, EXDEV if it leads out, ENOENT.
    """
    how = _OpenHow(
        flags=flags | os.O_CLOEXEC,
        mode=0,
        resolve=_RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS,
    )
    fd: int = _libc.syscall(
        _SYS_OPENAT2,
        folder,
        os.fsencode(name),
        ctypes.byref(how),
        ctypes.c_size_t(ctypes.sizeof(how)),
    )
    if fd >= 0:
        return fd
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EPERM):  # Linux before 5.6, or blocked by a container
        return open_beneath_by_parts(folder, name, flags)
    raise OSError(code, os.strerror(code), name)


def open_beneath_by_parts(folder: int, name: str, flags: int = os.O_RDONLY) -> int:
    """`open_beneath` without openat2(2): opens each part below the descriptor of the previous
    one."""
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or name.startswith("/"):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), name)
    above = os.dup(folder)
    try:
        for part in parts[:-1]:
            below = _open_part(part, _DIRECTORY, above, name)
            os.close(above)
            above = below
        return _open_part(parts[-1], flags | os.O_NOFOLLOW | os.O_CLOEXEC, above, name)
    finally:
        os.close(above)


def open_file_beneath(root: Path, name: str) -> int:
    """Open the regular file `root / name` for reading; no part of `name` may be a link. Raises
    OSError: EINVAL if it is not a regular file."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # non-blocking: opening a pipe without a writer would block
        fd = open_beneath(folder, name, os.O_RDONLY | os.O_NONBLOCK)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(root / name))
    return fd


def check_directory_beneath(root: Path, name: str) -> Path:
    """Return `root / name`; no part of `name` may be a link or lead out of `root`. Raises OSError
    that says what is wrong."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.close(open_beneath(folder, name, os.O_PATH | os.O_DIRECTORY))
    except OSError as e:
        why = (
            "leads through a symbolic link"
            if e.errno == errno.ELOOP
            else "leads out of it"
            if e.errno == errno.EXDEV
            else e.strerror
        )
        raise OSError(e.errno or errno.EINVAL, f"{name} in {root}: {why}") from e
    finally:
        os.close(folder)
    return root / name


def _open_part(part: str, flags: int, folder: int, shown: str) -> int:
    try:
        fd = os.open(part, flags, dir_fd=folder)
    except NotADirectoryError as e:
        if stat.S_ISLNK(os.stat(part, dir_fd=folder, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), shown) from e
        raise
    # with O_PATH, O_NOFOLLOW opens the link itself
    if flags & os.O_PATH and stat.S_ISLNK(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), shown)
    return fd
