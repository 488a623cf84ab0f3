"""Files of lazily restored memory: where it is in the image, the working set of a restore, and the
accesses that were recorded."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator

RECORD = "touched-pages"
"""File in the work directory with the recorded accesses: pid and address, `ACCESS` each."""
MAP = "lazy-{pid}.map"
"""File beside CRIU's images: number of the pages file and number of ranges, then (start, end,
position) of each range of lazily restored memory."""
MAP_HEAD, MAP_RANGE, ACCESS = struct.Struct("<QQ"), struct.Struct("<QQQ"), struct.Struct("<QQ")
WORKING_SET_RANGE = struct.Struct("<QQQ")
"""pid, start, end; the start of memory that is not in the image, because nothing was ever written
there, is odd, as is the address of such an access."""
EMPTY = 1
MAX_RECORDED = 1 << 16
"""Accesses that are recorded: 256 MiB. More is no working set, and memory is brought in order."""
_PAGE = mmap.PAGESIZE

Ranges = list[tuple[int, int]]
"""(start, end) of each."""


class PagesLost(Exception):
    """Raised when memory cannot be brought: the process must not run on."""


def read_working_set(file: int) -> dict[int, Ranges]:
    """pid → ranges. Raises OSError, PagesLost if the file is not whole."""
    data = os.pread(file, os.fstat(file).st_size, 0)
    if len(data) % WORKING_SET_RANGE.size:
        raise PagesLost(f"the working set has {len(data)} bytes: it is not whole")
    found: dict[int, Ranges] = {}
    for pid, start, end in WORKING_SET_RANGE.iter_unpack(data):
        found.setdefault(pid, []).append((start, end))
    return found


def read_map(data: bytes) -> tuple[int, list[tuple[int, int, int]]]:
    """The number of the pages file, and (start, end, position) of each lazy range. Raises
    ValueError if it is not whole."""
    if len(data) < MAP_HEAD.size:
        raise ValueError(f"it has {len(data)} bytes")
    number, count = MAP_HEAD.unpack_from(data)
    if len(data) != MAP_HEAD.size + count * MAP_RANGE.size:
        raise ValueError(f"it has {len(data)} bytes")
    return number, list(MAP_RANGE.iter_unpack(data[MAP_HEAD.size :]))


def ranges_of(accesses: bytes, *, gap_bytes: int = 4 * _PAGE) -> Iterator[tuple[int, int, int]]:
    """(pid, start, end) of the working set of recorded accesses, in the order of first accesses;
    neighbours are one range, also over small gaps in the image, which cost less than a range
    more."""
    firsts: dict[tuple[int, int], int] = {}
    for number, access in enumerate(ACCESS.iter_unpack(accesses)):
        firsts.setdefault(access, number)
    found: list[list[int]] = []
    for (pid, address), number in sorted(firsts.items()):
        gap = 0 if address & EMPTY else gap_bytes
        last = found[-1] if found else [-1, 0, 0, 0]
        is_alike = last[0] == pid and not (last[1] ^ address) & EMPTY
        if is_alike and address <= last[2] + EMPTY + gap:
            last[2], last[3] = (address & ~EMPTY) + _PAGE, min(last[3], number)
        else:
            found.append([pid, address, (address & ~EMPTY) + _PAGE, number])
    for pid, start, end, _ in sorted(found, key=lambda one: one[3]):
        yield pid, start, end
