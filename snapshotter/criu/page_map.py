"""Beside CRIU's images: where each range of memory that is restored lazily lies in them, as
`snapshotter.shim.pages.page_server` reads it. Made once, when the image is complete; reading CRIU's
own files takes some 10 ms."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from snapshotter.criu.image_files import (
    ERRORS,
    LAZY,
    PAGE,
    PRESENT,
    Mapping,
    NotUnderstood,
    PageRun,
    mappings,
    pagemap,
)
from snapshotter.shim.pages import page_files

_PAGEMAP = re.compile(r"pagemap-([0-9]+)\.img")


def write_page_maps(images: Path) -> None:
    """Write the map of every process. Without the maps of all, also where an image is not
    understood, the snapshot is only restored eagerly. Blocking; raises OSError."""
    for path in sorted(images.iterdir()):
        if (found := _PAGEMAP.fullmatch(path.name)) is None:
            continue
        pid = found[1]
        try:
            number, runs = pagemap(path.read_bytes())
            ranges = list(_lazy_ranges(runs, mappings((images / f"mm-{pid}.img").read_bytes())))
        except (NotUnderstood, FileNotFoundError, *ERRORS):
            continue
        data = page_files.MAP_HEAD.pack(number, len(ranges))
        data += b"".join(page_files.MAP_RANGE.pack(*one) for one in ranges)
        with (images / page_files.MAP.format(pid=pid)).open("xb") as f:
            os.fchmod(f.fileno(), 0o600)
            f.write(data)


def are_complete(names: Collection[str]) -> bool:
    """Whether an image of files with these names can be restored lazily."""
    pids = [found[1] for name in names if (found := _PAGEMAP.fullmatch(name))]
    return all(page_files.MAP.format(pid=pid) in names for pid in pids)


def eager_parts(images: Path) -> dict[str, list[tuple[int, int]]]:
    """Pages file → (offset, length) of what CRIU itself reads of it in a lazy restore. Blocking;
    raises OSError, and ValueError if a map is not whole, which the page server reports."""
    found: dict[str, list[tuple[int, int]]] = {}
    for path in images.glob(page_files.MAP.format(pid="*")):
        number, ranges = page_files.read_map(path.read_bytes())
        pages = images / f"pages-{number}.img"
        parts, at = found.setdefault(str(pages), []), 0
        for position, length in sorted((position, end - start) for start, end, position in ranges):
            if position > at:
                parts.append((at, position - at))
            at = position + length
        if (size := pages.stat().st_size) > at:
            parts.append((at, size - at))
    return found


def _lazy_ranges(
    runs: Sequence[PageRun], mapped: Sequence[Mapping]
) -> Iterator[tuple[int, int, int]]:
    """(start, end, position in the pages file), cut at the borders of mappings: the kernel fills a
    range of one mapping at a time."""
    position, at = 0, 0
    for run in runs:
        if not run.flags & PRESENT:
            raise NotUnderstood("a run of pages is in another image")
        start, end = run.address, run.address + run.pages * PAGE
        while run.flags & LAZY and start < end:
            while at < len(mapped) and mapped[at].end <= start:
                at += 1
            if at == len(mapped) or mapped[at].start > start:
                raise NotUnderstood("a run of pages is outside of the mappings")
            last = min(end, mapped[at].end)
            yield start, last, position + start - run.address
            start = last
        position += run.pages * PAGE
