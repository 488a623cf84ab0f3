"""Removal of zero pages from an image: memory that was allocated and is not used yet, such as an
engine's KV cache.

CRIU writes every page that was ever touched. A page of private anonymous memory that is not in the
image reads as zero (also with lazy pages), so zero pages can be omitted. Only whole blocks are
removed, because each removed run adds one more piece to read. An image that is not understood
completely stays unchanged."""

from __future__ import annotations

import bisect
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from snapshotter.criu.image_files import (
    ERRORS,
    PAGE,
    PRESENT,
    NotUnderstood,
    PageRun,
    encode_pagemap,
    mappings,
    pagemap,
)

BLOCK_PAGES = 64
"""Unit of the comparison and removal: 256 KiB."""
_ZEROS = bytes(BLOCK_PAGES * PAGE)


def drop_zero_pages(images: Path) -> int:
    """Remove the zero pages of every process; returns the number of bytes removed. Blocking, about
    0.1 s per GB. Raises OSError."""
    return sum(_drop_from(path) for path in sorted(images.glob("pagemap-[0-9]*.img")))


def _drop_from(path: Path) -> int:
    try:
        number, runs = pagemap(path.read_bytes())
        plain = [
            (mapping.start, mapping.end)
            for mapping in mappings(path.with_name(path.name.replace("pagemap", "mm")).read_bytes())
            if mapping.is_plain
        ]
        pages = path.with_name(f"pages-{number}.img")
        if sum(run.pages for run in runs) * PAGE != pages.stat().st_size or not all(
            run.flags & PRESENT for run in runs
        ):
            return 0
    except (NotUnderstood, FileNotFoundError, *ERRORS):
        return 0
    if not runs or not plain:
        return 0
    kept = list(_runs_to_keep(pages, runs, plain))
    left_out = (sum(run.pages for run in runs) - sum(run.pages for _, run in kept)) * PAGE
    if left_out:
        _copy(pages, kept)
        _replace(path, encode_pagemap(number, (run for _, run in kept)))
    return left_out


def _runs_to_keep(
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
    _rename(new, pages)


def _replace(path: Path, content: bytes) -> None:
    new = path.with_name(f"{path.name}.new")
    with new.open("xb") as f:
        os.fchmod(f.fileno(), 0o600)
        f.write(content)
    _rename(new, path)


def _rename(new: Path, path: Path) -> None:
    """In two steps: ext4 writes a file to the disk when it replaces another one (ext4(5),
    auto_da_alloc), 0.3 s for 250 MB, and no image needs that before it is published."""
    path.unlink()
    new.rename(path)
