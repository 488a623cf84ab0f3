"""Reading ahead: all of what is on the disk is asked for, what is in memory is left alone, and it
can be stopped."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

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
