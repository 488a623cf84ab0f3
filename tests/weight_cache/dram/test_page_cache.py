"""The page cache: what is in it is seen, what is not is brought, within the room there is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weight_cache.dram import page_cache
from weight_cache.dram.page_cache import Residency
from weight_cache.types import Tier

MIB = 1024**2


@pytest.fixture
def disk() -> Path:
    """Files of the repository's file system: what lies on tmpfs cannot leave memory."""
    return Path(__file__).parent


@pytest.fixture
def big(disk: Path, tmp_path: Path) -> Path:
    """20 MiB, durable, so that the page cache can let it go."""
    path = tmp_path / "big"
    with path.open("wb") as file:
        file.write(os.urandom(20 * MIB))
        file.flush()
        os.fsync(file.fileno())
    forget(path)
    if page_cache.measure_residency([path]).resident_bytes:
        pytest.skip("the temporary directory's file system keeps everything in memory")
    return path


def forget(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def never() -> bool:
    return False


def test_what_was_dropped_is_on_the_disk_and_what_was_brought_in_memory(big: Path) -> None:
    assert page_cache.measure_residency([big]).tier is Tier.NVME
    brought = page_cache.populate_page_cache([big], room_bytes=100 * MIB, stopped=never)
    assert (brought.size_bytes, brought.left_bytes) == (20 * MIB, 0)
    assert brought.seconds > 0
    assert page_cache.measure_residency([big]) == Residency(
        resident_bytes=20 * MIB, total_bytes=20 * MIB
    )
    assert page_cache.measure_residency([big]).tier is Tier.DRAM


def test_what_is_there_is_not_read_again(big: Path) -> None:
    page_cache.populate_page_cache([big], room_bytes=100 * MIB, stopped=never)
    assert (
        page_cache.populate_page_cache([big], room_bytes=100 * MIB, stopped=never).size_bytes == 0
    )


def test_only_as_much_as_there_is_room_for(big: Path) -> None:
    brought = page_cache.populate_page_cache([big], room_bytes=4 * MIB, stopped=never)
    assert (brought.size_bytes, brought.left_bytes) == (4 * MIB, 16 * MIB)
    assert page_cache.measure_residency([big]).resident_bytes < 18 * MIB
    assert page_cache.populate_page_cache([big], room_bytes=0, stopped=never).size_bytes == 0


def test_stops_between_pieces(big: Path) -> None:
    answers = iter([False, False, True])
    brought = page_cache.populate_page_cache(
        [big], room_bytes=100 * MIB, stopped=lambda: next(answers)
    )
    assert brought.size_bytes == page_cache.PIECE_BYTES


def test_both_ways_of_looking_agree(big: Path) -> None:
    page_cache.populate_page_cache([big], room_bytes=4 * MIB, stopped=never)
    descriptor = os.open(big, os.O_RDONLY)
    try:
        for offset, length in [(0, 20 * MIB), (0, 2 * MIB), (4097, 5000), (19 * MIB, MIB)]:
            one, other = (
                page_cache.cached_bytes(descriptor, offset, length),
                page_cache.mapped_bytes(descriptor, offset, length),
            )
            assert abs(one - other) <= 2 * os.sysconf("SC_PAGE_SIZE")
    finally:
        os.close(descriptor)


def test_what_is_gone_counts_for_nothing(tmp_path: Path) -> None:
    assert page_cache.measure_residency([tmp_path / "none"]) == Residency(
        resident_bytes=0, total_bytes=0
    )
    assert page_cache.measure_residency([]).tier is Tier.DRAM
    assert (
        page_cache.populate_page_cache([tmp_path / "none"], room_bytes=5, stopped=never).size_bytes
        == 0
    )


def test_large_models_are_looked_at_in_windows(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.truncate(3 * 1024 * MIB)
    found = page_cache.measure_residency([path, path.with_name("none")])
    assert found.total_bytes == 3 * 1024 * MIB
    assert found.tier is Tier.NVME


def test_share_that_makes_a_model_warm() -> None:
    assert Residency(resident_bytes=90, total_bytes=100).tier is Tier.DRAM
    assert Residency(resident_bytes=89, total_bytes=100).tier is Tier.NVME
    assert Residency(resident_bytes=89, total_bytes=100).absent_bytes == 11


def test_machine_says_what_memory_it_has() -> None:
    assert page_cache.available_bytes() > MIB
