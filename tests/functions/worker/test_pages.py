"""What a warm-up touches is found, and brought in where it was shared."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pilotlight.worker.process.page_prefetch import PAGE, Ranges, TouchedPages

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/pagemap").exists(), reason="the kernel has no pagemap"
)


def memory(pages: int) -> tuple[mmap.mmap, int]:
    """Private memory with every page written, and its address."""
    held = mmap.mmap(-1, pages * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for n in range(pages):
        held[n * PAGE] = 1
    return held, ctypes.addressof(ctypes.c_char.from_buffer(held))


def holds(ranges: Ranges, address: int) -> bool:
    return any(start <= address < start + length for start, length in ranges)


def in_a_fork(work: Callable[[], bool]) -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return os.waitpid(pid, 0)[1] == 0


def is_own(address: int) -> bool:
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        return os.pread(pagemap.fileno(), 8, address // PAGE * 8)[7] & 0x81 == 0x81


def test_pages_that_the_warm_up_writes_are_found_and_others_are_not() -> None:
    held, address = memory(64)
    touched = TouchedPages()

    touched.watch(lambda: held.__setitem__(5 * PAGE, 7))

    assert holds(touched.written, address + 5 * PAGE)
    assert not holds(touched.written, address + 20 * PAGE)


def test_written_pages_are_the_forks_own_before_it_writes() -> None:
    held, address = memory(64)
    touched = TouchedPages()
    touched.watch(lambda: held.__setitem__(5 * PAGE, 7))

    assert not in_a_fork(lambda: is_own(address + 5 * PAGE))

    def brought_in() -> bool:
        touched.populate()
        return (
            is_own(address + 5 * PAGE) and not is_own(address + 20 * PAGE) and held[5 * PAGE] == 7
        )

    assert in_a_fork(brought_in)


def test_file_pages_that_are_mapped_in_are_found(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    # far beyond the largest folio that a fault maps at once (2 MiB)
    file.write_bytes(os.urandom(4096 * PAGE))
    with file.open("r+b") as f, mmap.mmap(f.fileno(), 0, flags=mmap.MAP_PRIVATE) as weights:
        address = ctypes.addressof(ctypes.c_char.from_buffer(weights))
        weights[0]
        touched = TouchedPages()
        touched.record()
    assert holds(touched.files, address)
    assert not holds(touched.files, address + 4000 * PAGE)


def test_the_end_of_the_warm_up_is_the_end_of_the_copy_even_when_it_raises() -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text()
    with pytest.raises(ZeroDivisionError):
        TouchedPages().watch(lambda: sys.exit(1 // 0))
    assert children.read_text() == before


def test_ranges_that_are_gone_are_no_error() -> None:
    TouchedPages(written=[(16 * PAGE, PAGE)], files=[(32 * PAGE, PAGE)]).populate()
