"""Waiting for files of one directory to be written: inotify(7). Armed before it is first awaited, so that nothing falls in between."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

_IN_MODIFY, _IN_MOVED_TO, _IN_CREATE = 0x2, 0x80, 0x100
_libc = ctypes.CDLL(None, use_errno=True)


class DirectoryWatch:
    """One inotify descriptor. Owner: the event loop."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._changed = asyncio.Event()
        asyncio.get_running_loop().add_reader(fd, self._drain)

    async def wait_changed(self) -> None:
        """Return when something was written since the last return (at once if it was)."""
        await self._changed.wait()
        self._changed.clear()

    def close(self) -> None:
        """Stop watching."""
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._fd, 64 * 1024):
                self._changed.set()


@contextlib.contextmanager
def watching(directory: Path) -> Iterator[DirectoryWatch]:
    """Watch `directory` (not what is below). Raises OSError, as when the user's inotify instances are used up."""
    fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0 or _libc.inotify_add_watch(fd, os.fsencode(directory), _IN_MODIFY | _IN_MOVED_TO | _IN_CREATE) < 0:
        code = ctypes.get_errno()
        if fd >= 0:
            os.close(fd)
        raise OSError(code, f"cannot watch {directory}: {os.strerror(code)}")
    watch = DirectoryWatch(fd)
    try:
        yield watch
    finally:
        watch.close()
