"""The log file of one build's output: for people, bounded, written in batches. Its beginning and
end are kept. Logs of failed builds are kept for a time, and some of each tenant."""

from __future__ import annotations

import contextlib
import os
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

MAX_LOG_BYTES = 1024 * 1024
"""Per build. The output is also sent to the clients that wait for the build."""
KEPT_LOGS = 16
"""Logs kept of a tenant's failed builds, newest first; each may have a megabyte, and their number
is otherwise unbounded."""


class BuildLog:
    """The log of one build. Owner: the task of the build. Open within its `with` block, which
    truncates the file of an earlier build.

    The first half of `max_bytes` is written immediately, the last half at the end of the block.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_LOG_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._fd = -1
        self._size = 0
        self._last: deque[bytes] = deque()
        self._last_bytes = 0
        self._left_out_bytes = 0

    def __repr__(self) -> str:
        return f"<BuildLog {self.path} {self._size + self._last_bytes} bytes>"

    def __enter__(self) -> Self:
        self._fd = os.open(
            self.path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        remark = (
            [f"[{self._left_out_bytes} bytes omitted]\n".encode()] if self._left_out_bytes else []
        )
        with contextlib.suppress(OSError):  # a full disk, which the build has reported
            os.write(self._fd, b"".join([*remark, *self._last]))
        os.close(self._fd)

    def write(self, lines: Sequence[str]) -> None:
        """Append lines. Raises OSError."""
        encoded = [f"{line}\n".encode(errors="backslashreplace") for line in lines]
        head = 0
        if not self._last and not self._left_out_bytes:
            while head < len(encoded) and self._size + len(encoded[head]) <= self._max_bytes // 2:
                self._size += len(encoded[head])
                head += 1
            os.write(self._fd, b"".join(encoded[:head]))
        for line in encoded[head:]:
            self._last.append(line)
            self._last_bytes += len(line)
        while self._last_bytes > self._max_bytes - self._max_bytes // 2:
            gone = len(self._last.popleft())
            self._last_bytes -= gone
            self._left_out_bytes += gone


def prune_logs(
    logs: Iterable[Path], *, keep_s: float, now: float, missing: tuple[int, int] = (0, 0)
) -> int:
    """Remove logs of failed builds: old ones, and all but the newest of each tenant; returns how
    many were removed. Their names are those of images: `<digest>-<uid>.log`.

    `missing`: bytes and files that must be freed because the disk is below its floor; then the
    oldest are removed as well."""
    kept: Counter[str] = Counter()
    missing_bytes, missing_files = missing
    removed, left = 0, list[tuple[Path, int]]()
    for written_at, size_bytes, log in _newest_first(logs):
        tenant = log.stem.partition("-")[2]
        kept[tenant] += 1
        if kept[tenant] > KEPT_LOGS or now - written_at > keep_s:
            log.unlink(missing_ok=True)
            removed += 1
            missing_bytes, missing_files = missing_bytes - size_bytes, missing_files - 1
        else:
            left.append((log, size_bytes))
    while left and (missing_bytes > 0 or missing_files > 0):
        log, size_bytes = left.pop()
        log.unlink(missing_ok=True)
        removed += 1
        missing_bytes, missing_files = missing_bytes - size_bytes, missing_files - 1
    return removed


def _newest_first(logs: Iterable[Path]) -> list[tuple[float, int, Path]]:
    """Time, size and path of each."""
    found = []
    for log in logs:
        with contextlib.suppress(FileNotFoundError):
            status = log.lstat()
            found.append((status.st_mtime, status.st_size, log))
    return sorted(found, reverse=True)
