"""What memory an image carries by value, and why: the anonymous pages of a process, by cause.

Pages of files that nobody wrote to come back from the files. All others are in the image: allocations, weights that were copied
out of their mapping, libraries' own data. Source: proc_pid_smaps(5).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from snapshotter.snapshots.manifest import SnapshotManifest

LARGE = "large regions"
"""Anonymous mappings of 1 MiB and more that allocators take for one thing each: tensors, arenas, buffers."""
ALLOCATOR, STACKS, LIBRARIES, SHARED = "malloc heap", "stacks and small regions", "changed pages of files", "shared memory"
_LARGE_BYTES = 1024 * 1024
_WEIGHTS_SHARE = 0.8
"""Anonymous memory of at least this share of the weights is them: dtype conversions halve or double what is copied, but rarely all."""
_HEADER = re.compile(r"[0-9a-f]+-[0-9a-f]+ (?P<mode>[rwxsp-]{4}) [0-9a-f]+ \S+ \d+ *(?P<path>.*)")
_MB = 1_000_000


def causes(smaps: str) -> dict[str, int]:
    """Bytes by cause from the text of /proc/<pid>/smaps; causes without any are left out."""
    found: dict[str, int] = {}
    for mode, path, kept in _regions(smaps):
        cause = _cause(mode, path, kept)
        if kept:
            found[cause] = found.get(cause, 0) + kept
    return found


def _regions(smaps: str) -> Iterator[tuple[str, str, int]]:
    """(mode, path, bytes that an image must carry) of each mapping."""
    mode = path = ""
    anonymous = dirty = 0
    for line in smaps.splitlines():
        header = _HEADER.fullmatch(line)
        if header:
            yield mode, path, dirty if _is_shared_memory(mode, path) else anonymous
            mode, path, anonymous, dirty = header["mode"], header["path"], 0, 0
            continue
        name, _, value = line.partition(":")
        if name in ("Anonymous", "Swap"):
            anonymous += int(value.split()[0]) * 1024
        elif name in ("Shared_Dirty", "Private_Dirty"):
            dirty += int(value.split()[0]) * 1024
    yield mode, path, dirty if _is_shared_memory(mode, path) else anonymous


def _is_shared_memory(mode: str, path: str) -> bool:
    return mode.endswith("s") and path.startswith(("/dev/shm/", "/dev/zero", "/memfd:", "/SYSV"))


def _cause(mode: str, path: str, kept: int) -> str:
    if _is_shared_memory(mode, path):
        return SHARED
    if path == "[heap]":
        return ALLOCATOR
    if path.startswith("/"):
        return LIBRARIES
    return LARGE if kept >= _LARGE_BYTES else STACKS


def explain(manifest: SnapshotManifest, weights_bytes: int) -> list[str]:
    """For people, largest first: how many megabytes the image carries and why. `weights_bytes`: of the launch's weights, on disk."""
    heap = {cause: count for cause, count in manifest.heap_bytes.items() if count >= _MB}
    if not heap:
        return []
    parts = ", ".join(f"{_mb(count)} {cause}" for cause, count in sorted(heap.items(), key=lambda item: -item[1]))
    lines = [f"the image carries {_mb(sum(heap.values()))} of memory: {parts}"]
    if weights_bytes > 0:
        lines.append(_about_weights(manifest.heap_bytes, weights_bytes))
    return lines


def _about_weights(heap: Mapping[str, int], weights_bytes: int) -> str:
    copied = heap.get(LARGE, 0) + heap.get(ALLOCATOR, 0) + heap.get(SHARED, 0)
    if copied >= _WEIGHTS_SHARE * weights_bytes:
        return (
            f"that is enough to hold a copy of the weights ({_mb(weights_bytes)}): tensors that are mapped from their files, and neither "
            "converted nor cloned, stay out of it, and restoring then takes as long for any size"
        )
    return f"the weights ({_mb(weights_bytes)}) stay out of it, or most of them: they are mapped from their files"


def _mb(count: int) -> str:
    return f"{round(count / _MB):,} MB"
