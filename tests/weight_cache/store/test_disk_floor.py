"""The floor of free disk: who asks is refused below it, and work that cannot count what it writes
is cut off."""

from __future__ import annotations

import asyncio
import errno
import shutil
from pathlib import Path

import pytest

from pilotlight.core.disk_floor import BelowFloor, DiskFloor, free_bytes, no_floor
from tests.fakes.origins import MemoryOrigin
from tests.weight_cache.models import put_model
from weight_cache.errors import StoreFull
from weight_cache.store.store import Store


class Disk:
    """A disk with so much free."""

    def __init__(self, free: int) -> None:
        self.free = free

    def __call__(self, path: Path) -> int:
        return self.free


def test_floor_counts_what_is_about_to_be_written(tmp_path: Path) -> None:
    disk = Disk(1000)
    floor = DiskFloor(tmp_path, 400, free=disk)
    assert [floor.missing_bytes(more) for more in (0, 600, 601, 2000)] == [0, 0, 1, 1400]
    floor.require(600)
    with pytest.raises(BelowFloor, match="disk_floor_bytes keeps 400 for the journals") as refused:
        floor.require(601)
    assert refused.value.errno == errno.ENOSPC, "a full disk to whoever knows no better"
    disk.free = 0
    assert no_floor().missing_bytes(1 << 60) == 0


def test_floor_that_is_not_set_is_a_gibibyte_and_less_on_a_small_disk(tmp_path: Path) -> None:
    total = shutil.disk_usage(tmp_path).total
    assert DiskFloor(tmp_path / "not made", None).floor_bytes == min(1024**3, total // 50)
    assert DiskFloor(tmp_path, 0).missing_bytes(1 << 60) == 0


def test_free_disk_of_a_directory_that_is_not_made_yet(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "not" / "made") > 0


@pytest.mark.parametrize(
    "free, total, missing",
    [(65_536, 10**6, 0), (65_535, 10**6, 1), (2000, 20_000, 0), (500, 20_000, 1500), (0, 0, 0)],
    ids=["enough", "too few", "enough of a few", "too few of a few", "not counted"],
)
def test_a_floor_of_bytes_has_one_of_inodes_with_it(
    tmp_path: Path, free: int, total: int, missing: int
) -> None:
    floor = DiskFloor(tmp_path, 400, free=Disk(1000), inodes=lambda _: (free, total))
    assert floor.missing_inodes() == missing
    assert DiskFloor(tmp_path, 0, inodes=lambda _: (0, 10**6)).missing_inodes() == 0
    if not missing:
        return floor.require()
    kept = min(65_536, total // 10)
    with pytest.raises(
        BelowFloor,
        match=f"only {free} of {total} inodes are free in .*, and {kept} are kept for the "
        f"journals: remove",
    ):
        floor.require()
    return None


async def test_work_is_cancelled_when_it_uses_up_the_inodes(tmp_path: Path) -> None:
    left = [70_000, 10**6]

    async def fill() -> None:
        left[0] = 10
        await asyncio.sleep(60)

    floor = DiskFloor(tmp_path, 400, free=Disk(1000), inodes=lambda _: (left[0], left[1]))
    with pytest.raises(BelowFloor, match="inodes"):
        await floor.guard(fill())
    with pytest.raises(BelowFloor, match="inodes"):
        await floor.guard(fill())


async def test_work_is_cancelled_when_the_disk_falls_below_the_floor(tmp_path: Path) -> None:
    disk, ended = Disk(1000), asyncio.Event()

    async def fill() -> None:
        disk.free = 10
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with pytest.raises(BelowFloor):
        await DiskFloor(tmp_path, 400, free=disk).guard(fill())
    assert ended.is_set(), "the work is over when the error comes"
    with pytest.raises(BelowFloor):
        await DiskFloor(tmp_path, 400, free=disk).guard(fill())
    disk.free = 1000

    async def work() -> str:
        return "done"

    assert await DiskFloor(tmp_path, 400, free=disk).guard(work()) == "done"


async def test_guarded_work_ends_with_its_caller(tmp_path: Path) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    task = asyncio.create_task(DiskFloor(tmp_path, 400, free=Disk(1000)).guard(work()))
    await began.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert ended.is_set()


class StoreDisk:
    """A disk on which a store is all that there is."""

    def __init__(self, root: Path, size: int) -> None:
        self._root = root
        self.size = size

    def __call__(self, path: Path) -> int:
        return self.size - sum(
            p.stat().st_size for p in (self._root / "files").rglob("*") if p.is_file()
        )


async def test_weights_make_room_below_the_floor_and_are_refused_where_none_may_go(
    tmp_path: Path,
) -> None:
    origin, disk = MemoryOrigin(), StoreDisk(tmp_path / "w", 10_000)
    floor = DiskFloor(tmp_path, 4000, free=disk)
    store = Store.open(
        tmp_path / "w", origin=origin, max_bytes=100_000, clock=lambda: 1.0, floor=floor
    )
    try:
        first, second, third = (put_model(origin, {"w.bin": bytes([n]) * 3000}) for n in range(3))
        await store.prefetch(first)
        await store.prefetch(second)
        await store.prefetch(third)
        assert {model.manifest for model in store.models()} == {second, third}, (
            "the first made room"
        )
        for name in (second, third):
            await store.lease(name, holder=f"slot-{name}")
        with pytest.raises(StoreFull, match="disk_floor_bytes"):
            await store.prefetch(first)
        disk.size = 13_000
        await store.prefetch(first)
        assert len(store.models()) == 3
    finally:
        store.close()
