"""The writer's files: rows as they arrive, and Parquet files that are ready to be shipped.

`open/<tenant>~<function>~<hour>~<keep_s>~<id>.ndjson` collects the rows of one function and hour.
When it is large or old enough it becomes `ready/<…>~<rows>.parquet`. A file that a crash left is
converted again by the next process, to a file of the same name with the same rows, and the
controller stores each name once. Rows of monitored functions have a `ready/<…>~<rows>.sketch`
beside them, made after it.

All files together have a bound, and those of one tenant half of it; beyond either, rows are
dropped. Owner: the writer process, which locks the directory; the activator removes ready files
that were shipped."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from activator.prediction_log.bounded_process import BeyondLimits

OPEN, READY = "open", "ready"
ROTATE_BYTES: Final = 4 * 1024**2
MAX_OPEN: Final = 128
"""Functions and hours whose rows are collected at once; beyond it the oldest file is closed."""
MAX_FILES: Final = 10_000
"""Ready files: they are counted and listed as a whole."""
HOUR_S: Final = 3600
MIN_BYTES: Final = 4096
"""Of a file: it occupies as much on the disk."""
_PART: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")

Convert = Callable[[Iterable[bytes]], tuple[bytes, int]]
SketchRows = Callable[[Iterable[bytes]], bytes | None]


@dataclass(slots=True)
class _OpenFile:
    """A file that collects rows. `size`: bytes of complete lines."""

    path: Path
    file: BinaryIO
    began: float
    size: int = 0


class Spool:
    """The files in one directory. Owner: the writer process. `now` values are monotonic seconds.

    Attributes:
        dropped: rows that were not kept, by reason: `spool_full`, `disk` (it failed), `invalid`,
            `limits` (`bounded_process`).
        written: rows in files.
        ready: files that the activator can ship.
    """

    def __init__(
        self,
        directory: Path,
        convert: Convert,
        *,
        max_bytes: int,
        max_age_s: float,
        sketch: SketchRows = lambda _: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Lock the directory, waiting for a process that still has it. `sketch`: of rows, for
        drift; None = they have none. Raises OSError."""
        self._open_directory, self._ready_directory = directory / OPEN, directory / READY
        for one in (self._open_directory, self._ready_directory):
            one.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._convert, self._sketch = convert, sketch
        self._max_bytes, self._max_age_s = max_bytes, max_age_s
        self._now = now
        self._files: dict[str, _OpenFile] = {}
        self._unconverted: list[Path] = []
        self._used: Counter[str] = Counter()
        self.ready = 0
        self.dropped: Counter[str] = Counter()
        self.written = 0

    def __repr__(self) -> str:
        return f"<Spool {len(self._files)} open, {self.ready} ready, {self.used_bytes} bytes>"

    @property
    def used_bytes(self) -> int:
        """Bytes of all files."""
        return self._used.total()

    @property
    def open_age_s(self) -> float:
        """Age of the oldest file that collects rows; 0 = there is none."""
        return max((self._now() - one.began for one in self._files.values()), default=0.0)

    def recover(self) -> None:
        """Convert what a process before left."""
        self.measure()
        for path in sorted(self._open_directory.glob("*.ndjson")):
            self._convert_file(path)
        for path in self._ready_directory.glob("*.part"):
            path.unlink(missing_ok=True)
        self.measure()

    def append(self, row: bytes, *, tenant: str, function: str, at_s: float, keep_s: int) -> None:
        """Add a row, or drop it. Never raises."""
        if not _PART.fullmatch(tenant) or not _PART.fullmatch(function):
            self.dropped["invalid"] += 1
            return
        used = len(row) + 1
        if (
            self.used_bytes + used > self._max_bytes
            or self._used[tenant] + used > self._max_bytes // 2
            or self.ready >= MAX_FILES
        ):
            self.dropped["spool_full"] += 1
            return
        try:
            self._write(f"{tenant}~{function}~{int(at_s) // HOUR_S}~{keep_s}", row)
        except OSError:
            self.dropped["disk"] += 1
            return
        self._used[tenant] += used
        self.written += 1

    def rotate(self, *, all_files: bool = False) -> None:
        """Convert files that are old enough, or all."""
        waiting, self._unconverted = self._unconverted, []
        for path in waiting:
            self._convert_file(path)
        limit = self._now() - self._max_age_s
        for name, one in list(self._files.items()):
            if all_files or one.began <= limit:
                self._close(name)
        self.measure()

    def measure(self) -> None:
        """Count the files again: shipped ones are gone."""
        self._used.clear()
        ready = 0
        for directory in (self._open_directory, self._ready_directory):
            with os.scandir(directory) as entries:
                for entry in entries:
                    try:
                        size = max(MIN_BYTES, entry.stat().st_size)
                    except FileNotFoundError:
                        continue  # the activator has just shipped it
                    self._used[entry.name.partition("~")[0]] += size
                    ready += directory is self._ready_directory
        self.ready = ready

    def close(self) -> None:
        """Convert all files, and unlock the directory."""
        self.rotate(all_files=True)
        os.close(self._lock)
        self._lock = -1

    def _write(self, name: str, row: bytes) -> None:
        one = self._files.get(name)
        if one is None:
            if len(self._files) >= MAX_OPEN:
                self._close(next(iter(self._files)))
            path = self._open_directory / f"{name}~{time.time_ns():x}{secrets.token_hex(8)}.ndjson"
            one = self._files[name] = _OpenFile(path, path.open("xb", 0), self._now())
        line = row + b"\n"
        try:
            if one.file.write(line) != len(line):
                raise OSError("a part of a row was written")
        except OSError:
            os.ftruncate(one.file.fileno(), one.size)
            one.file.seek(one.size)
            raise
        one.size += len(line)
        if one.size >= ROTATE_BYTES:
            self._close(name)

    def _close(self, name: str) -> None:
        one = self._files.pop(name)
        one.file.close()
        self._convert_file(one.path)

    def _convert_file(self, path: Path) -> None:
        """Convert a file. Where the disk does not take it, it is tried again later."""
        try:
            lines = path.read_bytes().split(b"\n")[:-1]
            if lines:
                self._make_ready(path, lines)
            path.unlink(missing_ok=True)
        except OSError:
            self._unconverted.append(path)

    def _make_ready(self, path: Path, lines: list[bytes]) -> None:
        try:
            data, rows = self._convert(lines)
            sketch = self._sketch(lines)
        except BeyondLimits:
            self.dropped["limits"] += len(lines)
            return
        except (ValueError, TypeError, KeyError):  # damaged lines
            self.dropped["invalid"] += len(lines)
            return
        ready = self._ready_directory / f"{path.stem}~{rows}.parquet"
        _write_atomically(ready, data)
        if sketch is not None:
            _write_atomically(ready.with_suffix(".sketch"), sketch)


def _write_atomically(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all."""
    part = path.with_suffix(".part")
    try:
        part.write_bytes(data)
        part.rename(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
