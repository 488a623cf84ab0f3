"""Read-ahead of files in the background, before they are needed: posix_fadvise(2),
POSIX_FADV_WILLNEED. Which parts of libraries and weights a restored process needs is recorded by
the proof of its snapshot (`FileParts`).

One call reads at most the size of one device request, or of the read-ahead window, regardless of
its length argument (`force_page_cache_ra` in mm/readahead.c; measured: 8 MiB of 64 on one disk, 128
KiB on others), so it is called in small steps. Pieces that appear to be in the page cache already
(preadv2(2), RWF_NOWAIT, of a few bytes) are skipped: that check takes 0.3 ms for 300 MB."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import functools
import json
import mmap
import os
import re
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

FileParts = Mapping[str, Sequence[tuple[int, int]]]
"""Path → (offset, length) of the parts of the file to read, in bytes."""

_PIECE_BYTES = 16 * 1024**2
"""The unit that is probed, and skipped or read; between steps the thread can be stopped."""
_STEP_BYTES = 256 * 1024
_PROBES = 4
_PARTS_PROBED = 16
_GAP_BYTES = 64 * 1024
"""Parts of a file with less between them are one: a request more costs a disk as much."""
_MAX_TEXT_BYTES = 1024 * 1024
_MAX_PARTS = 16_384
_MAX_PARTS_BYTES = 1024**3
_MAX_PAGES = 8 * 1024**2
"""Most pages of the mappings that are looked at, with 4 KiB 32 GiB, some 0.1 s; those that do not
fit, such as large weights, are left out."""
_MAX_RUNS = 8 * _MAX_PARTS
"""Most parts before those with small gaps are joined."""
_PAGES_AT_ONCE = 128 * 1024
_ENTRY_BYTES = 8
"""Of /proc/pid/pagemap, per page; the top bit of the last byte: the page is present."""
_PRESENT = bytes(top >> 7 for top in range(256))


class ReadAhead:
    """Reads files ahead in one thread: first the parts of files, then whole files and directories.
    Owner: the event loop; the thread reads only `_stopped` of the mutable state."""

    def __init__(self, paths: Iterable[Path], parts: Callable[[], FileParts] = dict) -> None:
        """`parts`: called in the thread; if it raises OSError or ValueError there are none."""
        self._paths = list(paths)
        self._parts = parts
        self._began = time.perf_counter()
        self._stopped = False
        self._ms: float | None = None
        self._task = asyncio.create_task(asyncio.to_thread(self._run), name="read ahead")

    def ms(self) -> float:
        """Duration, or time so far."""
        return self._ms if self._ms is not None else (time.perf_counter() - self._began) * 1000

    def stop(self) -> None:
        """Stop; the remaining files are not read ahead."""
        self._stopped = True

    def _run(self) -> None:
        files: FileParts = {}
        with contextlib.suppress(OSError, ValueError):
            files = self._parts()
        if not _are_resident(files):
            for name, parts in files.items():
                self._ask(Path(name), parts)
        for path in self._paths:
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                self._ask(file)
        self._ms = (time.perf_counter() - self._began) * 1000

    def _ask(self, file: Path, parts: Sequence[tuple[int, int]] | None = None) -> None:
        """Read a file, or parts of it, ahead. Ignores one that cannot be opened: the reader will
        report it."""
        if self._stopped:
            return
        with _opened(file) as fd, contextlib.suppress(OSError):
            if fd is None:
                return
            size = os.fstat(fd).st_size
            for start, whole in [(0, size)] if parts is None else parts:
                end = min(size, start + whole)
                for offset in range(start, end, _PIECE_BYTES):
                    length = min(_PIECE_BYTES, end - offset)
                    if not _looks_resident(fd, offset, length):
                        self._ask_piece(fd, offset, length)

    def _ask_piece(self, fd: int, offset: int, length: int) -> None:
        for step in range(offset, offset + length, _STEP_BYTES):
            if self._stopped:
                return
            os.posix_fadvise(
                fd, step, min(_STEP_BYTES, offset + length - step), os.POSIX_FADV_WILLNEED
            )


def _are_resident(files: FileParts) -> bool:
    """Whether a sample of the parts can be read without waiting: then most often all can."""
    every = [(path, start) for path, parts in files.items() for start, _ in parts]
    for path, start in every[:: len(every) // _PARTS_PROBED + 1]:
        with _opened(Path(path)) as fd:
            if fd is None or not _looks_resident(fd, start, 1):
                return False
    return True


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[int | None]:
    """A descriptor of a regular file; None of anything else."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        yield None
        return
    try:
        yield fd if stat.S_ISREG(os.fstat(fd).st_mode) else None
    finally:
        os.close(fd)


def _looks_resident(fd: int, offset: int, length: int) -> bool:
    """Whether a few bytes of the range, including its last, can be read without waiting for the
    disk."""
    probe = [bytearray(1)]
    probes = min(_PROBES, length)
    try:
        for number in range(1, probes + 1):
            os.preadv(fd, probe, offset + length * number // probes - 1, os.RWF_NOWAIT)
    except OSError:
        return False  # EAGAIN, or the file system does not support it: read ahead anyway
    return True


def mapped_parts(pid: int, is_wanted: Callable[[str], bool]) -> dict[str, list[tuple[int, int]]]:
    """The parts of files that process `pid` has mapped in or has copies of (proc(5), maps and
    pagemap), by the paths that it sees; of those that `is_wanted`. Empty if it has exited, and
    where there are more parts than are worth it.

    The process chooses how many mappings it has, how long they are and what their files are called:
    `_MAX_PAGES` and `_MAX_RUNS` bound what this reads and keeps."""
    found: dict[str, list[tuple[int, int]]] = {}
    pages = runs = 0
    try:
        with (
            open(f"/proc/{pid}/maps", errors="surrogateescape") as maps,
            open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap,
        ):
            for line in maps:
                addresses, _, offset, _, _, *path = line.rstrip("\n").split(maxsplit=5)
                if not path or not is_wanted(path[0]):
                    continue
                start, end = (int(address, 16) // mmap.PAGESIZE for address in addresses.split("-"))
                if pages + end - start > _MAX_PAGES:
                    continue
                pages += end - start
                parts = found.setdefault(path[0], [])
                for first, length in _present(pagemap.fileno(), start, end):
                    at = int(offset, 16) + (first - start) * mmap.PAGESIZE
                    parts.append((at, length * mmap.PAGESIZE))
                    runs += 1
                    if runs > _MAX_RUNS:
                        return {}
    except OSError:
        return {}
    return {path: joined for path, parts in found.items() if (joined := _joined(parts))}


def _present(pagemap: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Page and length of the runs of present pages from `start` to `end`, which are cut where a
    read ends. Raises OSError."""
    for first in range(start, end, _PAGES_AT_ONCE):
        wanted = min(_PAGES_AT_ONCE, end - first)
        entries = os.pread(pagemap, wanted * _ENTRY_BYTES, first * _ENTRY_BYTES)
        present = entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES].translate(_PRESENT)
        for run in re.finditer(b"\x01+", present):
            yield first + run.start(), run.end() - run.start()


def _joined(parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted, without overlaps and small gaps."""
    joined: list[tuple[int, int]] = []
    for start, length in sorted(parts):
        if joined and start <= sum(joined[-1]) + _GAP_BYTES:
            first, before = joined[-1]
            joined[-1] = first, max(before, start + length - first)
        else:
            joined.append((start, length))
    return joined


def encode(parts: FileParts) -> str:
    """As text, for the manifest; "" if there are none, or more than are worth it."""
    text = json.dumps(parts, separators=(",", ":")).encode()
    try:
        _checked(json.loads(text))
    except ValueError:
        return ""
    if not parts or len(text) > _MAX_TEXT_BYTES:
        return ""
    return base64.b64encode(zlib.compress(text)).decode()


@functools.lru_cache(maxsize=32)
def decode(text: str) -> FileParts:
    """The reverse of `encode`. Raises ValueError if these are no parts of files."""
    if not text:
        return {}
    try:
        decompress = zlib.decompressobj()
        data = decompress.decompress(base64.b64decode(text, validate=True), _MAX_TEXT_BYTES)
    except (zlib.error, binascii.Error) as e:
        raise ValueError(f"the parts of files cannot be decoded: {e}") from e
    if not decompress.eof:
        raise ValueError("the parts of files are not whole, or too long")
    return _checked(json.loads(data))


def _checked(value: object) -> FileParts:
    """Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError("parts of files are an object")
    found: dict[str, list[tuple[int, int]]] = {}
    count = total = 0
    for path, parts in value.items():
        if not isinstance(parts, list) or not path.startswith("/") or "\0" in path:
            raise ValueError(f"{path!r} has no parts")
        found[path] = []
        for part in parts:
            match part:
                case [int(start), int(length)] if start >= 0 and length > 0:
                    found[path].append((start, length))
                    count, total = count + 1, total + length
                case _:
                    raise ValueError(f"{part!r} is no part of a file")
    if count > _MAX_PARTS or total > _MAX_PARTS_BYTES:
        raise ValueError(f"{count} parts of files with {total} bytes are too many")
    return found
