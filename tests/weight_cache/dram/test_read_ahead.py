"""Reading ahead: once per model, within the budget, while somebody holds it."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest

from weight_cache.dram import page_cache
from weight_cache.dram.read_ahead import ReadAhead
from weight_cache.types import Tier

MIB = 1024**2


class Speeds:
    """What was observed."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tier, int]] = []

    def observe(self, tier: Tier, size_bytes: int, seconds: float) -> None:
        if size_bytes:
            self.seen.append((tier, size_bytes))


def cold_file(path: Path, size: int) -> Path:
    with path.open("wb") as file:
        file.write(os.urandom(size))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if page_cache.measure_residency([path]).resident_bytes:
        pytest.skip("the temporary directory's file system keeps everything in memory")
    return path


async def until_read(ahead: ReadAhead) -> None:
    tasks = [task for task in asyncio.all_tasks() if task.get_name().startswith("read ahead")]
    await asyncio.gather(*tasks)


async def test_model_is_read_once_for_all_who_hold_it(tmp_path: Path) -> None:
    speeds, path = Speeds(), cold_file(tmp_path / "m", 3 * MIB)
    ahead = ReadAhead(max_bytes=10 * MIB, observe=speeds.observe)
    ahead.begin("m", [path])
    ahead.begin("m", [path])
    assert repr(ahead) == f"<ReadAhead {3 * MIB}/{10 * MIB} bytes of 1 models>"
    await until_read(ahead)
    assert speeds.seen == [(Tier.NVME, 3 * MIB)]
    assert page_cache.measure_residency([path]).tier is Tier.DRAM
    ahead.end("m")
    assert ahead.held_bytes == 3 * MIB
    ahead.end("m")
    assert ahead.held_bytes == 0
    await ahead.aclose()


async def test_what_does_not_fit_is_read_as_far_as_it_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    speeds, ahead = Speeds(), None
    caplog.set_level(logging.INFO, "weight_cache")
    first, second = cold_file(tmp_path / "1", 3 * MIB), cold_file(tmp_path / "2", 3 * MIB)
    ahead = ReadAhead(max_bytes=4 * MIB, observe=speeds.observe)
    ahead.begin("first", [first])
    ahead.begin("second", [second])
    await until_read(ahead)
    assert sorted(speeds.seen) == [(Tier.NVME, MIB), (Tier.NVME, 3 * MIB)]
    assert "size=3145728 room=1048576 of=4194304" in caplog.text
    await ahead.aclose()


async def test_machine_short_of_memory_is_left_alone(tmp_path: Path) -> None:
    speeds, path = Speeds(), cold_file(tmp_path / "m", 3 * MIB)
    ahead = ReadAhead(max_bytes=10 * MIB, observe=speeds.observe, available=lambda: 2 * MIB)
    ahead.begin("m", [path])
    await until_read(ahead)
    assert speeds.seen == [(Tier.NVME, MIB)]
    await ahead.aclose()


async def test_what_is_in_memory_takes_room_and_is_not_read(tmp_path: Path) -> None:
    speeds, path = Speeds(), cold_file(tmp_path / "m", MIB)
    ahead = ReadAhead(max_bytes=10 * MIB, observe=speeds.observe)
    ahead.begin("m", [path], is_resident=True)
    await until_read(ahead)
    assert (ahead.held_bytes, speeds.seen) == (MIB, [])
    ahead.end("m")
    await ahead.aclose()


async def test_zero_means_never(tmp_path: Path) -> None:
    speeds, path = Speeds(), cold_file(tmp_path / "m", MIB)
    ahead = ReadAhead(max_bytes=0, observe=speeds.observe)
    ahead.begin("m", [path])
    await until_read(ahead)
    assert speeds.seen == []
    assert page_cache.measure_residency([path]).tier is Tier.NVME
    ahead.end("m")
    await ahead.aclose()


async def test_last_holder_that_leaves_ends_the_reading(tmp_path: Path) -> None:
    speeds, path = Speeds(), cold_file(tmp_path / "m", MIB)
    ahead = ReadAhead(max_bytes=10 * MIB, observe=speeds.observe)
    ahead.begin("m", [path])
    ahead.end("m")  # before the thread has begun
    await until_read(ahead)
    assert speeds.seen in ([], [(Tier.NVME, MIB)])
    assert ahead.held_bytes == 0
    await ahead.aclose()
