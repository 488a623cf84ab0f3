"""The file with what a build printed: for people, bounded, written batch by batch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

MAX_LOG_BYTES = 16 * 1024 * 1024


class BuildLog:
    """Owner: the task of the build. Open inside of its `with` block, which empties the file of an earlier build.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_LOG_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._fd = -1
        self._size = 0

    def __repr__(self) -> str:
        return f"<BuildLog {self.path} {self._size} bytes>"

    def __enter__(self) -> Self:
        self._fd = os.open(self.path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        os.close(self._fd)

    def write(self, lines: Sequence[str]) -> None:
        """Append lines; once they do not fit the file says so, and takes no more. Raises OSError."""
        if self._size >= self._max_bytes:
            return
        data = "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")
        if self._size + len(data) > self._max_bytes:
            data = (
                data[: data.rfind(b"\n", 0, self._max_bytes - self._size) + 1] + f"[the log ends here: {self._max_bytes} bytes]\n".encode()
            )
            self._size = self._max_bytes
        self._size += os.write(self._fd, data)
