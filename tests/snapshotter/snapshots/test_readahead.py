"""Reading ahead: all of what is on the disk is asked for, what is in memory is left alone, and it
can be stopped."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import json
import mmap
import os
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotter.snapshots import readahead
from snapshotter.snapshots.readahead import ReadAhead
from weight_cache.dram.page_cache import cached_bytes

SIZE = 40 * 1024**2


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A directory with one file that is on the disk only."""
    folder = tmp_path / "images"
    folder.mkdir()
    with (folder / "pages-1.img").open("wb") as file:
        file.write(os.urandom(SIZE))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if shim_worker(folder):
        pytest.skip("the temporary directory's file system keeps everything in memory")
    return folder


def shim_worker(folder: Path) -> int:
    descriptor = os.open(folder / "pages-1.img", os.O_RDONLY)
    try:
        return cached_bytes(descriptor, 0, SIZE)
    finally:
        os.close(descriptor)


async def finished() -> None:
    await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name() == "read ahead"))


async def test_all_of_it_is_brought(image: Path) -> None:
    ahead = ReadAhead([image])
    await finished()
    async with asyncio.timeout(20):  # the last pages may still be on their way from a busy disk
        while shim_worker(image) < SIZE:
            await asyncio.sleep(0.01)
    took_ms = ahead.ms()
    assert ahead.ms() == took_ms  # it is over


async def test_what_is_stopped_is_not_brought(image: Path) -> None:
    ReadAhead([image]).stop()
    await finished()
    assert shim_worker(image) < SIZE


async def test_what_is_missing_is_nobodys_business_here(tmp_path: Path) -> None:
    ReadAhead([tmp_path / "none", tmp_path])
    await finished()


async def test_of_a_file_with_parts_only_those_are_brought(image: Path) -> None:
    file, at, length = image / "pages-1.img", 8 << 20, 1 << 20
    parts = {
        str(image / "none"): [(0, 4096)],
        str(image): [(0, 4096)],
        str(file): [(at, length), (SIZE + 4096, 1 << 30)],  # behind the end there is nothing
    }
    ReadAhead([], lambda: parts)
    await finished()
    async with asyncio.timeout(20):
        while cached(file, at, length) < length:
            await asyncio.sleep(0.01)
    assert shim_worker(image) < SIZE // 4


async def test_without_the_parts_the_files_are_still_brought(image: Path) -> None:
    def fails() -> readahead.FileParts:
        raise ValueError("the map is not whole")

    ReadAhead([image], fails)
    await finished()
    async with asyncio.timeout(20):
        while shim_worker(image) < SIZE:
            await asyncio.sleep(0.01)


def cached(file: Path, at: int, length: int) -> int:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        return cached_bytes(descriptor, at, length)
    finally:
        os.close(descriptor)


def test_parts_of_a_process_are_what_it_has_used_of_a_file(tmp_path: Path) -> None:
    file, page = tmp_path / "mapped", mmap.PAGESIZE
    file.write_bytes(bytes(512 * page))
    with file.open("r+b") as f, mmap.mmap(f.fileno(), 0, flags=mmap.MAP_PRIVATE) as used:
        used.madvise(mmap.MADV_RANDOM)  # no pages around
        used[300 * page] = 1  # a copy, which begins with the file's page
        for number in (0, 1, 100):
            assert used[number * page] == 0
        found = readahead.mapped_parts(os.getpid(), lambda path: path == str(file))
    (parts,) = found.values()
    assert {
        number for at, length in parts for number in range(at // page, (at + length) // page)
    } >= {0, 1, 100, 300}
    assert sum(length for _, length in parts) < 128 * page
    assert readahead.mapped_parts(2**22 + 1, lambda _: True) == {}  # beyond every pid


@contextlib.contextmanager
def huge_mapping(file: Path, size_bytes: int) -> Iterator[None]:
    """A mapping of a file that ends long before it: Python's own refuses it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    descriptor = os.open(file, os.O_RDONLY)
    try:
        address = libc.mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        assert address != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            libc.munmap(address, size_bytes)
    finally:
        os.close(descriptor)


def test_the_address_space_of_a_process_costs_its_reader_little(tmp_path: Path) -> None:
    file, other = tmp_path / "mapped", tmp_path / "other"
    for path in (file, other):
        path.write_bytes(bytes(mmap.PAGESIZE))
    began = time.monotonic()
    tracemalloc.start()
    try:
        # read at once, the pages of the first would take 512 MiB here
        with (
            huge_mapping(file, 1 << 38),
            other.open("r+b") as f,
            mmap.mmap(f.fileno(), 0) as small,
        ):
            small[0] = 1
            found = readahead.mapped_parts(
                os.getpid(), lambda path: path in (str(file), str(other))
            )
            assert list(found) == [str(other)]
        with huge_mapping(file, 1 << 34):
            readahead.mapped_parts(os.getpid(), lambda path: path == str(file))
        assert tracemalloc.get_traced_memory()[1] < 16 * 1024**2
    finally:
        tracemalloc.stop()
    assert time.monotonic() - began < 10


def test_more_parts_than_are_worth_it_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readahead, "_MAX_RUNS", 2)
    file, page = tmp_path / "mapped", mmap.PAGESIZE
    file.write_bytes(bytes(512 * page))
    with file.open("r+b") as f, mmap.mmap(f.fileno(), 0, flags=mmap.MAP_PRIVATE) as used:
        used.madvise(mmap.MADV_RANDOM)
        for number in (0, 100):
            used[number * page] = 1
        assert readahead.mapped_parts(os.getpid(), lambda path: path == str(file))
        used[200 * page] = 1
        assert readahead.mapped_parts(os.getpid(), lambda path: path == str(file)) == {}


def test_a_name_that_is_no_text_is_one(tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"\xff")
    file.write_bytes(bytes(mmap.PAGESIZE))
    with file.open("r+b") as f, mmap.mmap(f.fileno(), 0) as used:
        used[0] = 1
        found = readahead.mapped_parts(os.getpid(), lambda path: path == str(file))
    assert list(found) == [str(file)]
    assert readahead.decode(readahead.encode(found)) == found


def test_parts_are_read_back_as_they_were_written() -> None:
    parts = {"/usr/lib/a.so": [(0, 4096), (1 << 20, 8192)], "/usr/lib/b.so": [(4096, 1)]}
    assert readahead.decode(readahead.encode(parts)) == parts
    assert readahead.encode({}) == ""
    assert readahead.decode("") == {}


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"relative": [[0, 1]]},
        {"/a": [[-4096, 4096]]},
        {"/a": [[0, 0]]},
        {"/a": [[0.5, 1]]},
        {"/a": [[0]]},
        {"/a": None},
        {"/a": [[0, 1 << 40]]},
        {"/a": [[n, 1] for n in range(1 << 15)]},
    ],
)
def test_what_are_no_parts_is_refused(value: object) -> None:
    text = base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()
    with pytest.raises(ValueError):
        readahead.decode(text)
    with pytest.raises(ValueError):
        readahead.decode(text[:-8])
