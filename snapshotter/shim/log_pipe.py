"""Copies a worker's stdout and stderr to a rotated log file; runs in the shim.

Line format of the file: `2026-11-20T10:00:00.123456Z stdout <call id or -> text`. A line that
starts with `\\x1e<call id>\\x1f` belongs to that call; the marker is removed. Disk use is limited
twice: a file is rotated when full (one older file is kept), and a process that exceeds
REFILL_BYTES_PER_S after its burst loses bytes, which are counted, not parsed.
"""

from __future__ import annotations

import os
import select
import time

REFILL_BYTES_PER_S = 1024 * 1024
"""Sustained output rate of one process: far above real logs, far below what would keep a core busy.
"""
_READ_BYTES = 64 * 1024
_MAX_LINE_BYTES = 16 * 1024
_FLOOR_EVERY_BYTES = 256 * 1024
"""Bytes of one log between two checks of the free disk."""
_MARK, _MARK_END = b"\x1e", b"\x1f"


class LogFile:
    """The log of one instance or slot: `<name>.log`, and `<name>.log.1` after a rotation. Owner:
    the shim's loop.

    Attributes:
        dropped_bytes: bytes that were read and discarded.
    """

    def __init__(
        self, directory_fd: int, name: str, *, max_bytes: int, now: float, floor_bytes: int = 0
    ) -> None:
        self._directory_fd = directory_fd
        self._name = f"{name}.log"
        self._max_bytes = max_bytes
        self._allowance = float(max_bytes)
        self._refilled_at = now
        self._floor_bytes = floor_bytes
        self._unchecked = _FLOOR_EVERY_BYTES
        self._is_below = False
        self._fd, self._size = self._open()
        self.dropped_bytes = 0

    def __repr__(self) -> str:
        return f"<LogFile {self._name} {self._size} bytes, {self.dropped_bytes} dropped>"

    def allows(self, size: int, now: float) -> bool:
        """Whether `size` more bytes are within the allowance; deducts them, or counts them as
        dropped."""
        self._allowance = min(
            float(self._max_bytes), self._allowance + (now - self._refilled_at) * REFILL_BYTES_PER_S
        )
        self._refilled_at = now
        if self._allowance < size:
            self.dropped_bytes += size
            return False
        self._allowance -= size
        return True

    def write(self, data: bytes) -> None:
        """Append formatted lines. If the disk is full or below its floor they count as dropped: a
        log never blocks a function."""
        if self._floor_bytes and self._is_full(len(data)):
            self.dropped_bytes += len(data)
            return
        if self._size + len(data) > self._max_bytes and self._size:
            self._rotate()
        try:
            self._size += os.write(self._fd, data)
        except OSError:
            self.dropped_bytes += len(data)

    def _is_full(self, size: int) -> bool:
        self._unchecked += size
        if self._unchecked >= _FLOOR_EVERY_BYTES:
            self._unchecked = 0
            found = os.fstatvfs(self._directory_fd)
            self._is_below = found.f_bavail * found.f_frsize < self._floor_bytes
        return self._is_below

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _rotate(self) -> None:
        os.close(self._fd)
        os.rename(
            self._name,
            f"{self._name}.1",
            src_dir_fd=self._directory_fd,
            dst_dir_fd=self._directory_fd,
        )
        self._fd, self._size = self._open()

    def _open(self) -> tuple[int, int]:
        fd = os.open(
            self._name,
            os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC,
            0o600,
            dir_fd=self._directory_fd,
        )
        return fd, os.fstat(fd).st_size


class LogPipe:
    """One output stream of one process. Owner: the shim's loop, which owns the descriptor as
    well."""

    def __init__(self, fd: int, stream: str, log: LogFile) -> None:
        self.fd = fd
        self._stream = stream.encode()
        self._log = log
        self._rest = b""
        self._dropping = False
        os.set_blocking(fd, False)

    def pump(self) -> bool:
        """Read once; False at the end of the stream, True if there is no data yet."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return True
        if not data:
            return False
        now = time.time()
        if self._log.allows(len(data), now):
            if self._dropping:
                self._dropping = False
                self._rest = b""
                data = data.partition(b"\n")[2]
            self._take(data, now)
        elif not self._dropping:
            self._dropping = True
            self._log.write(
                self._line(
                    _prefix(now) + self._stream, b"[log limit reached: lines are dropped here]"
                )
            )
        return True

    def drain(self) -> None:
        """Read the remaining output and terminate the last line. Called after the process has
        exited."""
        for _ in range(1024):  # at most 64 MiB: another process may hold the pipe and keep printing
            before = self._log.dropped_bytes
            if (
                not _readable(self.fd)
                or not self.pump()
                or self._log.dropped_bytes > before + 16 * _READ_BYTES
            ):
                break
        if self._rest:
            rest, self._rest = self._rest, b""
            self._log.write(self._line(_prefix(time.time()) + self._stream, rest))

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)

    def _take(self, data: bytes, now: float) -> None:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > _MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        if lines:
            prefix = _prefix(now) + self._stream
            self._log.write(b"".join([self._line(prefix, line) for line in lines]))

    @staticmethod
    def _line(prefix: bytes, line: bytes) -> bytes:
        call = b"-"
        if line.startswith(_MARK):
            call, _, line = line[1:].partition(_MARK_END)
        return b"%b %b %b\n" % (prefix, call, line)


def _prefix(now: float) -> bytes:
    whole = int(now)
    return b"%s.%06dZ " % (
        time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)).encode(),
        int((now - whole) * 1e6),
    )


def _readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
