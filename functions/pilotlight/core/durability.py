"""Makes files, and changes of a directory, survive a power failure."""

from __future__ import annotations

import os
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Make names that were created, renamed or removed in `directory` durable. Blocks on the disk;
    raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes) -> None:
    """Write a file (mode 0600) atomically: a temporary file, fsync(2), rename(2). Raises OSError
    and leaves no file then."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        fresh.rename(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
