"""Files of a sandbox: each operation is a few system calls with the rights of its processes.

What is opened must be a regular file, and is opened without waiting: a named pipe would hold the
thread."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from typing import Any

from pilotlight.errors import (
    Conflict,
    Forbidden,
    InvalidInput,
    NotFound,
    PilotlightError,
    StorageFull,
)
from pilotlight.spec.sandboxes import FILE_PIECE_BYTES, MAX_ENTRIES

_KINDS: dict[int, type[PilotlightError]] = {
    errno.ENOENT: NotFound,
    errno.EACCES: Forbidden,
    errno.EPERM: Forbidden,
    errno.EROFS: Forbidden,
    errno.EEXIST: Conflict,
    errno.ENOTEMPTY: Conflict,
    errno.ENOSPC: StorageFull,
    errno.EDQUOT: StorageFull,
}


def error_of(error: OSError | ValueError, path: str) -> PilotlightError:
    """Return the error for a caller; `detail` has `errno` where the kernel gave one."""
    if not isinstance(error, OSError):
        return InvalidInput(f"{path[:200]!r}: {error}", parameter="path")
    kind = _KINDS.get(error.errno or 0, InvalidInput)
    return kind(f"{path[:200]!r}: {error.strerror or error}", errno=error.errno or 0)


def read(path: str, *, offset: int, limit: int) -> bytes:
    """Return up to `limit` bytes from `offset` on. Raises OSError."""
    descriptor = _open(path, os.O_RDONLY)
    try:
        return os.pread(descriptor, min(limit, FILE_PIECE_BYTES), offset)
    finally:
        os.close(descriptor)


def write(path: str, data: bytes, *, offset: int | None, truncate: bool, exclusive: bool) -> int:
    """Write all of `data` at `offset` (None: at the end), and return the offset behind it. The file
    is created if it is missing; `exclusive`: it must be. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT
    flags |= (os.O_TRUNC if truncate else 0) | (os.O_EXCL if exclusive else 0)
    descriptor = _open(path, flags)
    try:
        at = os.lseek(descriptor, 0, os.SEEK_END) if offset is None else offset
        left = memoryview(data)
        while left:
            written = os.pwrite(descriptor, left, at)
            left, at = left[written:], at + written
        return at
    finally:
        os.close(descriptor)


def describe(path: str) -> dict[str, Any]:
    """Return size and kind of a file or directory. Raises OSError."""
    found = os.stat(path)
    return {"size_bytes": found.st_size, "is_directory": stat.S_ISDIR(found.st_mode)}


def entries(path: str) -> list[str]:
    """Return the names in a directory, sorted. Raises OSError, for more than MAX_ENTRIES too."""
    names = os.listdir(path)
    if len(names) > MAX_ENTRIES:
        raise OSError(errno.EFBIG, f"{len(names)} entries, at most {MAX_ENTRIES} are listed")
    return sorted(names)


def make_directory(path: str, *, parents: bool) -> None:
    """Make a directory; with `parents` also those above it, and it may be there. Raises OSError."""
    if parents:
        os.makedirs(path, exist_ok=True)
    else:
        os.mkdir(path)


def remove(path: str, *, recursive: bool) -> None:
    """Remove a file or an empty directory; with `recursive` all that is in it. Raises OSError."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
    elif recursive:
        shutil.rmtree(path)
    else:
        os.rmdir(path)


def _open(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(
            errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "it is not a regular file"
        )
    return descriptor
