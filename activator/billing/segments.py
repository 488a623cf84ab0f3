"""The journal's files: numbered segments, appended to by one process, read by offset, deleted
oldest first.

A line is written with one `write(2)`: it survives the death of the process the moment the call
returns, and that of the machine after the next `fdatasync`. A write that fits only in part is taken
back, so no torn line is ever in the middle."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from activator.billing.errors import JournalFull, JournalInUse

LOCK_NAME = "journal.lock"
CHECKPOINT_NAME = "shipped.json"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Cursor:
    """A place in the journal: everything before byte `offset` of segment `segment`, and all older
    segments."""

    segment: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A complete line (without its newline) and where it stands."""

    text: bytes
    segment: int
    offset: int

    @property
    def end(self) -> Cursor:
        """The place behind it."""
        return Cursor(segment=self.segment, offset=self.offset + len(self.text) + 1)


def segment_path(directory: Path, number: int) -> Path:
    """Where segment `number` lies."""
    return directory / f"journal-{number:08d}.ndjson"


def segment_numbers(directory: Path) -> list[int]:
    """Numbers of the segments that are there, oldest first."""
    return sorted(int(p.stem.removeprefix("journal-")) for p in directory.glob("journal-*.ndjson"))


def read_segment(directory: Path, number: int, *, offset: int = 0) -> Iterator[Line]:
    """The complete lines of a segment from `offset`; a torn last line is left out."""
    with segment_path(directory, number).open("rb") as f:
        f.seek(offset)
        for text in f:
            if not text.endswith(b"\n"):
                return
            yield Line(text=text[:-1], segment=number, offset=offset)
            offset += len(text)


class SegmentFile:
    """The segment that is being written. Owned by the journal."""

    def __init__(self, directory: Path, number: int, *, header: bytes) -> None:
        """Create it with its first line, durably. Raises JournalFull; then nothing is left
        behind."""
        self.number = number
        self.size = 0
        self.path = segment_path(directory, number)
        try:
            self.fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as e:
            raise JournalFull(
                f"cannot create {self.path}: {e.strerror}; free some space", retry_after_s=5
            ) from e
        try:
            self.append(header)
            os.fdatasync(self.fd)
            sync_directory(directory)
        except (JournalFull, OSError):
            os.close(self.fd)
            self.path.unlink()
            raise

    def append(self, line: bytes) -> int:
        """Write a line; returns its offset. Raises JournalFull when the disk does not take all of
        it; then none of it is there."""
        try:
            written = os.write(self.fd, line)
        except OSError as e:
            raise JournalFull(
                f"the journal {self.path} takes no more: {e.strerror}; free some space",
                retry_after_s=5,
            ) from e
        if written != len(line):
            os.ftruncate(self.fd, self.size)
            raise JournalFull(
                f"the journal {self.path} took {written} of {len(line)} bytes: free some space",
                retry_after_s=5,
            )
        offset = self.size
        self.size = offset + written
        return offset


def lock(directory: Path) -> int:
    """Become the directory's owner; returns the lock's descriptor, which must stay open. Raises
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
    """Raises JournalInUse where another process owns the directory. Nothing is made there."""
    try:
        # we may be root yet
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
        f"{directory} belongs to process {owner}: stop it, or give this activator an id of its own"
    )


def load_checkpoint(directory: Path) -> Cursor:
    """Up to where the ledger has everything; the very beginning when that was never written
    (records are sent again)."""
    try:
        body = json.loads((directory / CHECKPOINT_NAME).read_bytes())
        return Cursor(segment=int(body["segment"]), offset=int(body["offset"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return Cursor()


def save_checkpoint(directory: Path, cursor: Cursor) -> None:
    """Write the checkpoint durably: complete or not at all. Blocks on the disk; raises OSError."""
    fresh = directory / f"{CHECKPOINT_NAME}.new"
    with fresh.open("wb") as f:
        f.write(json.dumps({"segment": cursor.segment, "offset": cursor.offset}).encode())
        f.flush()
        os.fsync(f.fileno())
    fresh.replace(directory / CHECKPOINT_NAME)
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    """Make names that were created, renamed or removed in `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
