"""Waits for writes to files of one directory: inotify(7). Active before the first await, so that no
event is missed."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

_IN_MODIFY, _IN_MOVED_TO, _IN_CREATE, _IN_Q_OVERFLOW = 0x2, 0x80, 0x100, 0x4000
_EVENT = struct.Struct("iIII")
"""struct inotify_event: watch, mask, cookie, length of the name that follows."""
_libc = ctypes.CDLL(None, use_errno=True)

OnChanged = Callable[[set[str] | None], None]
"""Called with the names of written files; None: any file may have been written."""


class DirectoryWatch:
    """One inotify descriptor. Owner: the event loop."""

    def __init__(
        self, fd: int, on_changed: OnChanged | None = None, *, pause_s: float = 0.0
    ) -> None:
        self._fd = fd
        self._on_changed = on_changed
        self._pause_s = pause_s
        self._changed = asyncio.Event()
        self._resuming: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._listen()

    async def wait_changed(self) -> None:
        """Return when something was written since the last return (immediately if it was)."""
        await self._changed.wait()
        self._changed.clear()

    def close(self) -> None:
        """Stop watching."""
        if self._resuming is not None:
            self._resuming.cancel()
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _listen(self) -> None:
        self._loop.add_reader(self._fd, self._drain)

    def _drain(self) -> None:
        names: set[str] = set()
        is_lost = False
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._fd, 64 * 1024):
                self._changed.set()
                if self._on_changed is not None:
                    is_lost |= _read_names(data, names)
        if self._on_changed is not None and (names or is_lost):
            self._on_changed(None if is_lost else names)
        if self._pause_s:  # the kernel collects events in the meantime and merges equal ones
            self._loop.remove_reader(self._fd)
            self._resuming = self._loop.call_later(self._pause_s, self._listen)


def _read_names(data: bytes, names: set[str]) -> bool:
    """Add the names in these events; returns whether the kernel lost some."""
    at, is_lost = 0, False
    while at < len(data):
        _, mask, _, length = _EVENT.unpack_from(data, at)
        at += _EVENT.size + length
        is_lost |= bool(mask & _IN_Q_OVERFLOW)
        if length:
            names.add(os.fsdecode(data[at - length : at].rstrip(b"\0")))
    return is_lost


@contextlib.contextmanager
def watching(
    directory: Path, on_changed: OnChanged | None = None, *, pause_s: float = 0.0
) -> Iterator[DirectoryWatch]:
    """Watch `directory`, not its subdirectories. Raises OSError, for example when the user's
    inotify instances are exhausted.

    `on_changed` is called with the written files, at most every `pause_s`.
    """
    fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if (
        fd < 0
        or _libc.inotify_add_watch(
            fd, os.fsencode(directory), _IN_MODIFY | _IN_MOVED_TO | _IN_CREATE
        )
        < 0
    ):
        code = ctypes.get_errno()
        if fd >= 0:
            os.close(fd)
        raise OSError(code, f"cannot watch {directory}: {os.strerror(code)}")
    watch = DirectoryWatch(fd, on_changed, pause_s=pause_s)
    try:
        yield watch
    finally:
        watch.close()
