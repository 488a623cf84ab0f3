"""Copies a worker's stdout and stderr to its log file (`log_file`); runs in the shim.

Line format of the file: `2026-11-20T10:00:00.123456Z stdout <call id or -> text`. A line that
starts with `\\x1e<call id>\\x1f` belongs to that call; the marker is removed.
"""

from __future__ import annotations

import os
import select
import time

from snapshotter.shim.log_file import LogFile

_READ_BYTES = 64 * 1024
_MAX_LINE_BYTES = 16 * 1024
_MARK, _MARK_END = b"\x1e", b"\x1f"


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
            self._split(data, now)
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

    def _split(self, data: bytes, now: float) -> None:
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
