"""A report of the memory contained in an image: the anonymous pages of a process, by cause.

Unmodified pages of files are restored from the files. All others are in the image: allocations,
weights copied out of their mapping, libraries' own data. Source: proc_pid_smaps(5)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from snapshotter.snapshots.manifest import SnapshotManifest

LARGE = "large regions"
"""Anonymous mappings of 1 MiB and more, which allocators use for one object each: tensors, arenas,
buffers."""
UNEXPLAINED = "processes with too many mappings to look at"
ALLOCATOR, STACKS, LIBRARIES, SHARED = (
    "malloc heap",
    "stacks and small regions",
    "changed pages of files",
    "shared memory",
)
_LARGE_BYTES = 1024 * 1024
_HEADER = re.compile(r"[0-9a-f]+-[0-9a-f]+ (?P<mode>[rwxsp-]{4}) [0-9a-f]+ \S+ \d+ *(?P<path>.*)")
_MB = 1_000_000


def causes(smaps: str) -> dict[str, int]:
    """Bytes by cause, from the text of /proc/<pid>/smaps or of smaps_rollup; causes with 0 bytes
    are omitted."""
    found: dict[str, int] = {}
    for mode, path, kept in _regions(smaps):
        cause = _cause(mode, path, kept)
        if kept:
            found[cause] = found.get(cause, 0) + kept
    return found


def _regions(smaps: str) -> Iterator[tuple[str, str, int]]:
    """(mode, path, bytes that an image must contain) of each mapping."""
    mode = path = ""
    anonymous = dirty = 0
    for line in smaps.splitlines():
        if header := _header(line):
            yield mode, path, dirty if _is_shared_memory(mode, path) else anonymous
            mode, path, anonymous, dirty = header["mode"], header["path"], 0, 0
            continue
        name, _, value = line.partition(":")
        if name in ("Anonymous", "Swap"):
            anonymous += int(value.split()[0]) * 1024
        elif name in ("Shared_Dirty", "Private_Dirty"):
            dirty += int(value.split()[0]) * 1024
    yield mode, path, dirty if _is_shared_memory(mode, path) else anonymous


def _header(line: str) -> re.Match[str] | None:
    """The header line of a mapping; its 20 other lines begin with a name."""
    return None if line[:1].isupper() else _HEADER.fullmatch(line)


def _is_shared_memory(mode: str, path: str) -> bool:
    return mode.endswith("s") and path.startswith(("/dev/shm/", "/dev/zero", "/memfd:", "/SYSV"))


def _cause(mode: str, path: str, kept: int) -> str:
    if _is_shared_memory(mode, path):
        return SHARED
    if path == "[rollup]":
        return UNEXPLAINED
    if path == "[heap]":
        return ALLOCATOR
    if path.startswith("/"):
        return LIBRARIES
    return LARGE if kept >= _LARGE_BYTES else STACKS


def without_zero_pages(found: Mapping[str, int], left_out: int) -> dict[str, int]:
    """Subtract so many bytes of zero pages, from the largest regions first: whole zero blocks are
    not the result of small allocations."""
    out = dict(found)
    for cause in sorted(found, key=lambda cause: (cause != LARGE, -found[cause])):
        taken = min(left_out, out[cause])
        out[cause], left_out = out[cause] - taken, left_out - taken
    return {cause: count for cause, count in out.items() if count}


def mapped_bytes(smaps: str, prefix: str) -> int:
    """Bytes of the mappings of files below `prefix`; a file mapped by several processes counts
    once."""
    regions: dict[str, dict[str, int]] = {}
    header = None
    for line in smaps.splitlines():
        if match := _header(line):
            header = (match["path"], line.split()[2]) if match["path"].startswith(prefix) else None
        elif header is not None and line.startswith("Size:"):
            path, offset = header
            regions.setdefault(path, {})[offset] = int(line.split()[1]) * 1024
    return sum(sum(by_offset.values()) for by_offset in regions.values())


def describe(
    manifest: SnapshotManifest, *, has_weights: bool, is_engine: bool = False
) -> list[str]:
    """Text lines, largest first: how many megabytes the image contains and why.

    `has_weights`: whether the launch mounts any. `is_engine`: whether an engine loads them."""
    heap = {cause: count for cause, count in manifest.heap_bytes.items() if count >= _MB}
    if not heap:
        return []
    parts = ", ".join(
        f"{_mb(count)} {cause}" for cause, count in sorted(heap.items(), key=lambda item: -item[1])
    )
    lines = [f"the image carries {_mb(sum(heap.values()))} of memory: {parts}"]
    if manifest.weights_bytes >= _MB:
        lines.append(
            f"{_mb(manifest.weights_bytes)} of weights are not in it: they are mapped from their "
            f"files"
        )
    elif has_weights and is_engine:
        lines.append(
            "the engine copied its weights into its own memory, so they are in it, as is its KV "
            "cache: a smaller cache restores faster"
        )
    elif has_weights:
        lines.append(
            "no weights are mapped from their files: loaded weights were copied and are in it; "
            "tensors that stay mapped, neither converted nor cloned, would not be in it, and "
            "restore time would not depend on their size"
        )
    return lines


def _mb(count: int) -> str:
    return f"{round(count / _MB):,} MB"
