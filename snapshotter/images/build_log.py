"""The log file of one build's output: for people, bounded, written in batches. Its beginning and
end are kept."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

MAX_LOG_BYTES = 1024 * 1024
"""Per build. The output is also sent to the clients that wait for the build."""


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
