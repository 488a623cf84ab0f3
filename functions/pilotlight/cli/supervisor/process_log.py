"""Log file of one process, written by the process and rotated by the supervisor.

The process holds the file open with O_APPEND, so it can log even after the supervisor has died, and
the supervisor can rotate by copying and truncating. Lines written between the two, within some
microseconds, are lost."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

KEEP = 3
"""Number of rotated files to keep; `<name>.log.1` is the newest."""
_TAIL_BYTES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLog:
    """A log file: `path` is the current file, `max_bytes` the size above which it is rotated."""

    path: Path
    max_bytes: int = 10 * 1024**2

    def open(self) -> int:
        """Open the file (0600) for appending, for the process's stdout and stderr. The caller
        closes the descriptor."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def size(self) -> int:
        """Current size in bytes; 0 if there is no file."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def rotate(self) -> bool:
        """Rotate the file if it exceeds `max_bytes`; return whether it did."""
        if self.size() <= self.max_bytes:
            return False
        for n in range(KEEP, 1, -1):
            older = self._aside(n - 1)
            if older.exists():
                older.replace(self._aside(n))
        shutil.copyfile(self.path, self._aside(1))
        os.truncate(self.path, 0)
        return True

    def tail(self, lines: int, *, since_byte: int = 0) -> list[str]:
        """The last `lines` lines written at or after `since_byte`."""
        end = self.size()
        start = max(since_byte if since_byte <= end else 0, end - _TAIL_BYTES)
        if end == 0:
            return []
        with self.path.open("rb") as f:
            f.seek(start)
            return f.read().decode(errors="replace").splitlines()[-lines:]

    def _aside(self, n: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{n}")
