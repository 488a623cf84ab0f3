"""The image of a process's memory, mapped for the kernel to copy from."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable

from snapshotter.shim.pages.missing_pages import MissingPages
from snapshotter.shim.pages.page_files import MAP, PagesLost, read_map

_POPULATE_READ = 22
_PAGE = mmap.PAGESIZE
AROUND_BYTES = 16 * _PAGE
"""What is brought after a page that the process waits for, from around it."""


class PageImage:
    """The pages of one process in its image, mapped at `address` for the kernel to copy from."""

    def __init__(self, images: int, pid: int) -> None:
        with open(os.open(MAP.format(pid=pid), os.O_RDONLY, dir_fd=images), "rb") as f:
            data = f.read()
        try:
            number, ranges = read_map(data)
        except ValueError as e:
            raise PagesLost(f"the map of process {pid} is truncated: {e}") from e
        self._fd = os.open(f"pages-{number}.img", os.O_RDONLY, dir_fd=images)
        size = os.fstat(self._fd).st_size
        if any(position + end - start > size for start, end, position in ranges):
            raise PagesLost(f"pages-{number}.img is truncated: it has {size} bytes")
        protection = mmap.PROT_READ | mmap.PROT_WRITE  # ctypes needs a writable buffer
        self._map = mmap.mmap(self._fd, size, flags=mmap.MAP_PRIVATE, prot=protection)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.missing = MissingPages(ranges)

    def read_ahead(self, ranges: Iterable[tuple[int, int, int]]) -> None:
        """Have the disk read all ranges at once, unless they seem to be in the page cache."""
        found = [(position, end - start) for start, end, position in ranges]
        if all(self._is_cached(position) for position, _ in found[:: len(found) // 8 + 1]):
            return
        for position, length in found:
            os.posix_fadvise(self._fd, position, length, os.POSIX_FADV_WILLNEED)

    def _is_cached(self, position: int) -> bool:
        try:
            return os.preadv(self._fd, [bytearray(1)], position, os.RWF_NOWAIT) == 1
        except OSError:  # EAGAIN, or the file system cannot tell
            return False

    def map_in_all(self, parts: Iterable[tuple[int, int]]) -> None:
        """`map_in` (position, length) of these; neighbours by one call, because a call costs as
        much as mapping some 16 pages."""
        at = until = 0
        for position, length in sorted(parts):
            if position > until + AROUND_BYTES:
                self.map_in(at, until - at)
                at = position
            until = max(until, position + length)
        self.map_in(at, until - at)

    def map_in(self, position: int, length: int) -> None:
        """Have these bytes in this process. Raises PagesLost if they cannot be read."""
        if not length:
            return
        try:
            self._map.madvise(_POPULATE_READ, position, length)
        except OSError as e:
            if e.errno != errno.EINVAL:  # before Linux 5.14 the copy maps them in, page by page
                raise PagesLost(f"the image cannot be read at {position}: {e.strerror}") from e
