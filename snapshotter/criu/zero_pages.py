"""Removal of zero pages from an image: memory that was allocated and is not used yet, such as an
engine's KV cache.

CRIU writes every page that was ever touched. A page of private anonymous memory that is not in the
image reads as zero (also with lazy pages), so zero pages can be omitted. Only whole blocks are
removed, because each removed run adds one more piece to read. An image that is not understood
completely stays unchanged.

Formats of CRIU's images (`images/*.proto` of its source): two magic numbers, then protobuf
messages, each preceded by its length. `pagemap-<pid>.img`: a head with the number of the pages
file, then runs of pages; `pages-<n>.img`: the pages, run after run; `mm-<pid>.img`: one message
with the mappings."""

from __future__ import annotations

import bisect
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE = mmap.PAGESIZE
BLOCK_PAGES = 64
"""Unit of the comparison and removal: 256 KiB."""
_COMMON_MAGIC, _PAGEMAP_MAGIC, _MM_MAGIC = 0x54564319, 0x56084025, 0x57492820
_PRESENT = 1 << 2
"""Flag of a run: its pages are in this image's file."""
_PLAIN, _ANONYMOUS = 1 << 0 | 1 << 1 | 1 << 5, 1 << 9
"""Status of a mapping: regular, stack, heap; and private anonymous."""
_VMAS = 14
_ZEROS = bytes(BLOCK_PAGES * PAGE)


class NotUnderstood(Exception):
    """Raised when an image does not have the expected format."""


@dataclass(frozen=True, slots=True)
class PageRun:
    """A number of pages at an address; `flags` as in the image."""

    address: int
    pages: int
    flags: int


def drop_zero_pages(images: Path) -> int:
    """Remove the zero pages of every process; returns the number of bytes removed. Blocking, about
    0.1 s per GB. Raises OSError."""
    return sum(_leave_out_of(pagemap) for pagemap in sorted(images.glob("pagemap-[0-9]*.img")))


def _leave_out_of(pagemap: Path) -> int:
    try:
        number, runs = _pagemap(pagemap.read_bytes())
        plain = _plain_spans(pagemap.with_name(pagemap.name.replace("pagemap", "mm")).read_bytes())
        pages = pagemap.with_name(f"pages-{number}.img")
        if sum(run.pages for run in runs) * PAGE != pages.stat().st_size or not all(
            run.flags & _PRESENT for run in runs
        ):
            return 0
    except (NotUnderstood, FileNotFoundError, struct.error, IndexError):
        return 0
    if not runs:
        return 0
    kept = list(_kept(pages, runs, plain))
    left_out = (sum(run.pages for run in runs) - sum(run.pages for _, run in kept)) * PAGE
    if left_out:
        _copy(pages, kept)
        _replace(pagemap, _encoded(number, (run for _, run in kept)))
    return left_out


def _kept(
    pages: Path, runs: Iterable[PageRun], plain: list[tuple[int, int]]
) -> Iterator[tuple[int, PageRun]]:
    """The runs to keep, each with the index of its first page in the file."""
    with pages.open("rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as data:
        at = 0
        for run in runs:
            for first, count in _pieces(data, at, run, plain):
                yield first, PageRun(run.address + (first - at) * PAGE, count, run.flags)
            at += run.pages


def _pieces(
    data: mmap.mmap, at: int, run: PageRun, plain: list[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """(first page, pages) of the parts of a run between zero blocks."""
    start = at
    for place in range(at, at + run.pages - BLOCK_PAGES + 1, BLOCK_PAGES):
        address = run.address + (place - at) * PAGE
        if data[place * PAGE : (place + BLOCK_PAGES) * PAGE] == _ZEROS and _is_plain(
            address, plain
        ):
            if place > start:
                yield start, place - start
            start = place + BLOCK_PAGES
    if at + run.pages > start:
        yield start, at + run.pages - start


def _is_plain(address: int, plain: list[tuple[int, int]]) -> bool:
    """Whether a whole block is in a plain mapping. `plain` is sorted."""
    at = bisect.bisect_right(plain, address, key=lambda span: span[0]) - 1
    return at >= 0 and address + BLOCK_PAGES * PAGE <= plain[at][1]


def _copy(pages: Path, kept: Iterable[tuple[int, PageRun]]) -> None:
    new = pages.with_name(f"{pages.name}.new")
    with pages.open("rb") as source, new.open("xb") as target:
        os.fchmod(target.fileno(), 0o600)
        for first, run in kept:
            offset, left = first * PAGE, run.pages * PAGE
            while left:
                done = os.sendfile(target.fileno(), source.fileno(), offset, left)
                offset, left = offset + done, left - done
    new.replace(pages)


def _replace(path: Path, content: bytes) -> None:
    new = path.with_name(f"{path.name}.new")
    with new.open("xb") as f:
        os.fchmod(f.fileno(), 0o600)
        f.write(content)
    new.replace(path)


# -- messages


def _pagemap(data: bytes) -> tuple[int, list[PageRun]]:
    """The number of the pages file, and the runs. Raises NotUnderstood."""
    messages = _messages(data, _PAGEMAP_MAGIC)
    if not messages or set(head := dict(_fields(messages[0]))) != {1}:
        raise NotUnderstood("head")
    runs = []
    for message in messages[1:]:
        fields = dict(_fields(message))
        # 2: the field in which older versions stored the count
        if not {1, 2, 4, 5} == fields.keys() or fields[2] != 0:
            raise NotUnderstood("run")
        runs.append(PageRun(_number(fields[1]), _number(fields[5]), _number(fields[4])))
    return _number(head[1]), runs


def _encoded(number: int, runs: Iterable[PageRun]) -> bytes:
    out = bytearray(struct.pack("<II", _COMMON_MAGIC, _PAGEMAP_MAGIC))
    messages = [_varints({1: number})]
    messages += [_varints({1: run.address, 2: 0, 4: run.flags, 5: run.pages}) for run in runs]
    for message in messages:
        out += struct.pack("<I", len(message)) + message
    return bytes(out)


def _plain_spans(data: bytes) -> list[tuple[int, int]]:
    """Private anonymous mappings, sorted. Raises NotUnderstood."""
    (message,) = _messages(data, _MM_MAGIC) or [b""]
    spans = []
    for field, value in _fields(message):
        if field == _VMAS and isinstance(value, bytes):
            vma = dict(_fields(value))
            status = _number(vma[7])
            if status & _ANONYMOUS and not status & ~(_PLAIN | _ANONYMOUS):
                spans.append((_number(vma[1]), _number(vma[2])))
    if not spans:
        raise NotUnderstood("mappings")
    return sorted(spans)


def _messages(data: bytes, magic: int) -> list[bytes]:
    if struct.unpack_from("<II", data) != (_COMMON_MAGIC, magic):
        raise NotUnderstood("magic")
    found, at = [], 8
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        found.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    if at != len(data):
        raise NotUnderstood("length")
    return found


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of one message: varints as numbers, the rest as bytes. Raises NotUnderstood,
    IndexError."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        length, at = (8, at) if kind == 1 else (4, at) if kind == 5 else _varint(message, at)
        if kind not in (1, 2, 5) or at + length > len(message):
            raise NotUnderstood("field")
        yield key >> 3, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _varints(fields: dict[int, int]) -> bytes:
    out = bytearray()
    for number, value in fields.items():
        for one in (number << 3, value):
            while one >= 0x80:
                out.append(one & 0x7F | 0x80)
                one >>= 7
            out.append(one)
    return bytes(out)


def _number(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise NotUnderstood("number")
    return value
