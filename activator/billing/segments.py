"""The journal's files as they are found: numbered segments, read by offset; the lock of their
directory; the checkpoint. `segment_log` writes segments."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from activator.billing.errors import JournalInUse
from pilotlight.core.durability import sync_directory

LOCK_NAME = "journal.lock"
CHECKPOINT_NAME = "shipped.json"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Cursor:
    """A position in the journal: after all older segments and byte `offset` of segment
    `segment`."""

    segment: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A complete line (without its newline) and its position."""

    text: bytes
    segment: int
    offset: int

    @property
    def end(self) -> Cursor:
        """Position after the line."""
        return Cursor(segment=self.segment, offset=self.offset + len(self.text) + 1)


def segment_path(directory: Path, number: int) -> Path:
    """Path of segment `number`."""
    return directory / f"journal-{number:08d}.ndjson"


def segment_numbers(directory: Path) -> list[int]:
    """Numbers of the existing segments, oldest first."""
    return sorted(int(p.stem.removeprefix("journal-")) for p in directory.glob("journal-*.ndjson"))


def read_segment(directory: Path, number: int, *, offset: int = 0) -> Iterator[Line]:
    """Yield the complete lines of a segment from `offset`, without a torn last line."""
    with segment_path(directory, number).open("rb") as f:
        f.seek(offset)
        for text in f:
            if not text.endswith(b"\n"):
                return
            yield Line(text=text[:-1], segment=number, offset=offset)
            offset += len(text)


def lock(directory: Path) -> int:
    """Lock the directory. Returns the lock's file descriptor, which must stay open. Raises
    JournalInUse."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = directory / LOCK_NAME
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        refusal = _in_use(directory, descriptor)
        os.close(descriptor)
        raise refusal from e
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def require_unused(directory: Path) -> None:
    """Raises JournalInUse when another process owns the directory. Creates nothing."""
    try:
        # the process may still run as root
        descriptor = os.open(
            directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        )
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as e:
        raise _in_use(directory, descriptor) from e
    finally:
        os.close(descriptor)


def _in_use(directory: Path, descriptor: int) -> JournalInUse:
    owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
    return JournalInUse(
        f"{directory} belongs to process {owner}: stop it, or give this activator another id"
    )


def load_checkpoint(directory: Path) -> Cursor:
    """Read up to which position the ledger has all records. Returns the beginning when there is no
    valid checkpoint; records are then sent again."""
    try:
        body = json.loads((directory / CHECKPOINT_NAME).read_bytes())
        return Cursor(segment=int(body["segment"]), offset=int(body["offset"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return Cursor()


def save_checkpoint(directory: Path, cursor: Cursor) -> None:
    """Write the checkpoint durably and atomically. Blocks on the disk; raises OSError."""
    fresh = directory / f"{CHECKPOINT_NAME}.new"
    with fresh.open("wb") as f:
        f.write(json.dumps({"segment": cursor.segment, "offset": cursor.offset}).encode())
        f.flush()
        os.fsync(f.fileno())
    fresh.replace(directory / CHECKPOINT_NAME)
    sync_directory(directory)
