"""Captures the output of a slot's processes through pipes, and writes it to log files. Runs in the
shim; standard library only."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Sequence
from functools import partial

from snapshotter.shim.event_loop import Poller
from snapshotter.shim.log_file import LogFile
from snapshotter.shim.log_pipe import LogPipe

_NOTICE_INTERVAL_S = 1.0


class LogCapture:
    """Log files and pipes of one slot; `notify` sends `log_dropped` to the agent. Owner: the shim's
    loop."""

    def __init__(
        self,
        poller: Poller,
        notify: Callable[..., None],
        *,
        directory: int,
        max_bytes: int,
        floor_bytes: int = 0,
    ) -> None:
        self._poller = poller
        self._notify = notify
        self._directory = directory
        self._max_bytes = max_bytes
        self._floor_bytes = floor_bytes
        self._noticed: dict[str, tuple[int, float]] = {}

    def __repr__(self) -> str:
        return f"<LogCapture {len(self._noticed)} logs dropped lines>"

    def open(self, name: str) -> LogFile:
        """The log file of that name. Raises OSError."""
        return LogFile(
            self._directory,
            name,
            max_bytes=self._max_bytes,
            now=time.time(),
            floor_bytes=self._floor_bytes,
        )

    def unnamed_file(self) -> int:
        """An unnamed file on the log disk, owned by the caller. Raises OSError, ENOSPC below the
        disk's floor."""
        found = os.fstatvfs(self._directory)
        if found.f_bavail * found.f_frsize < self._floor_bytes:
            raise OSError(errno.ENOSPC, "the disk is nearly full")
        with contextlib.suppress(OSError):  # not every file system supports O_TMPFILE
            return os.open(
                ".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=self._directory
            )
        name = f".{os.urandom(8).hex()}"
        fd = os.open(
            name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=self._directory
        )
        os.unlink(name, dir_fd=self._directory)
        return fd

    def pipes_into(self, log: LogFile, pipes: list[LogPipe]) -> list[int]:
        """Create pipes for stdout and stderr, appended to `pipes`; returns the write ends, owned by
        the caller. Raises OSError."""
        ends = []
        for stream in ("stdout", "stderr"):
            readable, writable = os.pipe2(os.O_CLOEXEC)
            pipe = LogPipe(readable, stream, log)
            pipes.append(pipe)
            self._poller.watch(
                readable,
                partial(self._on_readable, pipe, log),
                paced=True,
            )
            ends.append(writable)
        return ends

    def _on_readable(self, pipe: LogPipe, log: LogFile, _events: int) -> None:
        self._on_output(pipe, log)

    def finish(self, log: LogFile, pipes: Sequence[LogPipe]) -> None:
        """Read the remaining output, then close pipes and file."""
        for pipe in pipes:
            pipe.drain()
            self._poller.unwatch(pipe.fd)
            pipe.close()
        self._notice_drops(log, final=True)
        log.close()

    def _on_output(self, pipe: LogPipe, log: LogFile) -> None:
        if not pipe.pump():
            self._poller.unwatch(pipe.fd)
        self._notice_drops(log)

    def _notice_drops(self, log: LogFile, *, final: bool = False) -> None:
        name, now = repr(log).split()[1], time.monotonic()
        reported, at = self._noticed.get(name, (0, 0.0))
        if log.dropped_bytes > reported and (final or now - at >= _NOTICE_INTERVAL_S):
            self._noticed[name] = (log.dropped_bytes, now)
            self._notify(
                {"event": "log_dropped", "log": name, "bytes": log.dropped_bytes - reported}
            )
