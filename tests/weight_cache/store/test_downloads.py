"""Models come in by lane, each byte once; what came half is not fetched again."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pilotlight.core.disk_floor import FLOOR_INODES, DiskFloor
from tests.fakes.origins import MemoryOrigin
from tests.fakes.waiting import until
from tests.weight_cache.models import chunked, digest_of, put_model
from weight_cache.errors import ChunkCorrupt, OriginUnavailable, StoreFailed, StoreFull
from weight_cache.fetch.read_scheduler import ReadScheduler
from weight_cache.manifest import CHUNK_BYTES
from weight_cache.store.scrubber import ScrubRate
from weight_cache.store.store import Store
from weight_cache.types import LoadProgress, ReadPriority

CONTENT = chunked(b"a", b"b", b"c")
WEIGHTS = digest_of(CONTENT)
BUDGET = 200 * 1024 * 1024


class Home:
    """A store that can be opened again, and what its fetches were measured at."""

    def __init__(self, root: Path, origin: MemoryOrigin) -> None:
        self.root = root
        self.origin = origin
        self.observed: list[tuple[int, float]] = []
        self.store = self._open()

    def reopen(self) -> Store:
        self.store.close()
        self.store = self._open()
        return self.store

    def listing(self, folder: str) -> list[str]:
        return sorted(p.name for p in (self.root / folder).iterdir())

    def _open(self) -> Store:
        return Store.open(
            self.root,
            origin=self.origin,
            max_bytes=BUDGET,
            clock=time.time,
            lanes=ReadScheduler(4, 0.25),
            observe=lambda size, seconds: self.observed.append((size, seconds)),
        )


@pytest.fixture
def origin() -> MemoryOrigin:
    return MemoryOrigin()


@pytest.fixture
def home(tmp_path: Path, origin: MemoryOrigin) -> Iterator[Home]:
    opened = Home(tmp_path / "w", origin)
    yield opened
    opened.store.close()


async def fail_at(home: Home, name: str, index: int) -> None:
    """One fetch that loses chunk `index`, and has the others."""
    home.origin.lost = {(WEIGHTS, index * CHUNK_BYTES)}
    with pytest.raises(OriginUnavailable):
        await home.store.lease(name, holder="s")
    home.origin.lost = set()
    home.origin.ranges.clear()


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_next_try_fetches_only_what_is_missing(
    home: Home, origin: MemoryOrigin, is_restarted: bool
) -> None:
    name = put_model(origin, {"w": CONTENT})
    await fail_at(home, name, 3)  # the last one: the others have arrived, or are given up
    half = home.store.statistics().partial_bytes
    assert half % CHUNK_BYTES == 0
    assert (home.listing("tmp"), home.listing("files"), home.store.statistics().used_bytes) == (
        [],
        [],
        half,
    )
    assert home.store.missing_bytes(name) == len(CONTENT) - half
    store = home.reopen() if is_restarted else home.store
    assert store.missing_bytes(name) == len(CONTENT) - half
    seen: list[LoadProgress] = []
    _, path = await store.lease(name, holder="s", on_progress=seen.append)
    assert (path / "w").read_bytes() == CONTENT
    assert len(origin.ranges) == 4 - half // CHUNK_BYTES
    assert store.statistics().resumed_bytes == half
    assert (seen[0].done_bytes, seen[-1].done_bytes) == (0, len(CONTENT))
    assert [p.done_bytes for p in seen] == sorted(p.done_bytes for p in seen)
    assert (home.listing("partial"), home.listing("tmp"), store.missing_bytes(name)) == ([], [], 0)


async def test_fetch_that_everybody_left_leaves_its_half_for_the_next(
    home: Home, origin: MemoryOrigin
) -> None:
    name = put_model(origin, {"w": CONTENT})
    arrived = asyncio.Event()
    ask = asyncio.create_task(
        home.store.lease(
            name, holder="s", on_progress=lambda p: arrived.set() if p.done_bytes else None
        )
    )
    await arrived.wait()
    ask.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ask
    half = home.store.statistics().partial_bytes
    assert half >= CHUNK_BYTES
    assert (home.listing("tmp"), home.store.statistics().arriving, home.store.leases()) == (
        [],
        0,
        [],
    )
    before = origin.read_bytes
    await home.store.lease(name, holder="s")
    assert origin.read_bytes - before == len(CONTENT) - half
    assert home.store.statistics().resumed_bytes == half


async def test_half_file_with_a_flipped_bit_is_noticed_after_a_restart(
    home: Home, origin: MemoryOrigin
) -> None:
    name = put_model(origin, {"w": CONTENT})
    await fail_at(home, name, 3)
    half = home.store.statistics().partial_bytes
    with (home.root / "partial" / WEIGHTS).open("r+b") as stream:
        for offset in range(0, len(CONTENT), CHUNK_BYTES):
            stream.seek(offset + 5)
            stream.write(b"!")
    store = home.reopen()
    assert (await store.lease(name, holder="s"))[1].joinpath("w").read_bytes() == CONTENT
    assert half
    assert store.statistics().resumed_bytes == 0
    assert len(origin.ranges) == 4


async def test_two_models_that_share_a_file_read_it_once_and_both_hear_how_far_it_is(
    home: Home, origin: MemoryOrigin
) -> None:
    one, two = put_model(origin, {"w": CONTENT}), put_model(origin, {"w": CONTENT, "c": b"{}"})
    heard: list[list[LoadProgress]] = [[], []]
    origin.gates[WEIGHTS] = asyncio.Event()
    asks = [
        asyncio.create_task(home.store.lease(n, holder="s", on_progress=h.append))
        for n, h in zip((one, two), heard, strict=True)
    ]
    await until(lambda: bool(heard[0] and heard[1]))
    await asyncio.sleep(0)
    origin.gates.pop(WEIGHTS).set()
    await asyncio.gather(*asks)
    assert origin.read_bytes == len(CONTENT) + 2 + len(origin.blobs[one]) + len(origin.blobs[two])
    assert [h[-1].done_bytes for h in heard] == [len(CONTENT), len(CONTENT) + 2]
    assert all(len({p.done_bytes for p in h}) >= 5 for h in heard)


async def test_eight_starts_at_once_read_each_byte_once(home: Home, origin: MemoryOrigin) -> None:
    name = put_model(origin, {"w": CONTENT})
    await asyncio.gather(*(home.store.lease(name, holder=f"s{i}") for i in range(8)))
    assert home.store.statistics().fetched_bytes == len(CONTENT)
    assert origin.most_at_once <= 4


async def test_small_files_come_side_by_side_within_the_bound(
    home: Home, origin: MemoryOrigin
) -> None:
    name = put_model(origin, {f"f{i:02}": b"x" * (i + 1) for i in range(30)})
    _, path = await home.store.lease(name, holder="s")
    assert len(list(path.iterdir())) == 30
    assert 1 < origin.most_at_once <= 4


async def test_prefetch_that_a_caller_joins_becomes_urgent(
    home: Home, origin: MemoryOrigin
) -> None:
    """Beside a START a prefetch has one turn of four, until somebody waits for it too."""
    held = chunked(b"k", tail=b"")
    urgent, wanted = put_model(origin, {"w": held}), put_model(origin, {"w": CONTENT})
    origin.gates = {digest_of(held): asyncio.Event(), WEIGHTS: asyncio.Event()}
    start = asyncio.create_task(home.store.lease(urgent, holder="s"))
    await until(lambda: origin.at_once == 1)
    prefetch = asyncio.create_task(home.store.prefetch(wanted))
    await until(lambda: origin.at_once == 2)
    await asyncio.sleep(0.01)
    assert origin.at_once == 2
    caller = asyncio.create_task(home.store.lease(wanted, holder="s"))
    await until(lambda: origin.at_once == 4)
    for gate in origin.gates.values():
        gate.set()
    await asyncio.gather(start, prefetch, caller)


async def test_fetches_are_measured_together(home: Home, origin: MemoryOrigin) -> None:
    one, two = put_model(origin, {"w": CONTENT}), put_model(origin, {"w": chunked(b"q")})
    await asyncio.gather(home.store.prefetch(one), home.store.prefetch(two))
    assert sum(size for size, _ in home.observed) == len(CONTENT) + CHUNK_BYTES + 4
    assert all(seconds > 0 for _, seconds in home.observed)
    home.observed.clear()
    await home.store.prefetch(one)
    assert home.observed == []


async def test_failed_fetch_says_nothing_about_speed(home: Home, origin: MemoryOrigin) -> None:
    await fail_at(home, put_model(origin, {"w": CONTENT}), 2)
    assert home.observed == []


async def test_who_joins_late_hears_at_once_how_far_it_is(home: Home, origin: MemoryOrigin) -> None:
    name, seen = put_model(origin, {"w": CONTENT, "held": b"back"}), list[LoadProgress]()
    origin.gates[digest_of(b"back")] = asyncio.Event()
    arrived = asyncio.Event()
    first = asyncio.create_task(
        home.store.lease(
            name,
            holder="s",
            on_progress=lambda p: arrived.set() if p.done_bytes == len(CONTENT) else None,
        )
    )
    await arrived.wait()
    second = asyncio.create_task(home.store.lease(name, holder="t", on_progress=seen.append))
    await asyncio.sleep(0)
    assert seen == [LoadProgress(done_bytes=len(CONTENT), total_bytes=len(CONTENT) + 4)]
    origin.gates.clear()
    second.cancel()
    first.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert home.store.statistics().arriving == 0


@pytest.mark.slow  # a model of gigabytes
async def test_model_larger_than_the_budget_is_refused_with_both_numbers_before_anything_is_fetched(
    home: Home, origin: MemoryOrigin
) -> None:
    name = put_model(origin, {"w": chunked(*[b"z"] * 13)})
    with pytest.raises(
        StoreFull,
        match=rf"weights of {13 * CHUNK_BYTES + 4} bytes are larger than the store's budget of "
        rf"{BUDGET} bytes",
    ):
        await home.store.lease(name, holder="s")
    assert origin.reads == 1  # the manifest
    assert home.listing("partial") == []


async def test_known_manifest_is_not_asked_for_again(home: Home, origin: MemoryOrigin) -> None:
    name = put_model(origin, {"w": b"abc"})
    await home.store.prefetch(name)
    assert await home.store.drop(name)
    assert home.store.missing_bytes(name) == 3
    (home.root / "manifests" / name).write_bytes(b"rubbish")
    origin.ranges.clear()
    await home.store.prefetch(name)
    assert [digest for digest, _ in origin.ranges] == [name, digest_of(b"abc")]
    assert await home.store.drop(name)
    origin.ranges.clear()
    store = home.reopen()
    assert store.missing_bytes(name) == 3
    await store.prefetch(name)
    assert [digest for digest, _ in origin.ranges] == [digest_of(b"abc")]


async def test_nothing_is_known_of_a_model_that_nobody_asked_for(home: Home) -> None:
    assert home.store.missing_bytes("0" * 64) is None
    assert home.store.files("0" * 64) == []


async def test_damaged_chunk_of_many_is_asked_for_once_more_and_the_others_stay(
    home: Home, origin: MemoryOrigin
) -> None:
    name = put_model(origin, {"w": CONTENT})
    origin.damaged[WEIGHTS] = 1
    assert (await home.store.lease(name, holder="s"))[1].joinpath("w").read_bytes() == CONTENT
    other = put_model(origin, {"v": chunked(b"d", b"e")})
    origin.damaged[digest_of(chunked(b"d", b"e"))] = 100
    with pytest.raises(ChunkCorrupt, match="v: bytes from"):
        await home.store.lease(other, holder="s")
    assert home.listing("partial") == []


async def test_disk_that_refuses_is_named(home: Home, origin: MemoryOrigin) -> None:
    name = put_model(origin, {"w": CONTENT})
    (home.root / "partial").rmdir()
    (home.root / "partial").write_text("no folder")
    with pytest.raises(StoreFailed, match=r"failed for model .* permissions"):
        await home.store.lease(name, holder="s", lane=ReadPriority.PREFETCH)
    assert home.store.statistics().arriving == 0


async def test_a_file_condemned_after_another_model_linked_it_is_not_in_that_model(
    home: Home, origin: MemoryOrigin
) -> None:
    await home.store.prefetch(put_model(origin, {"a": b"shared"}))
    shared = digest_of(b"shared")
    name = put_model(origin, {**{f"{n:04d}": b"shared" for n in range(2000)}, "own": b"own"})
    file = home.root / "files" / shared
    file.chmod(0o644)
    file.write_bytes(b"SHARED")
    arriving = asyncio.create_task(home.store.lease(name, holder="s"))
    while not list((home.root / "tmp").glob("*/1998")):
        await asyncio.sleep(0)
    await home.store.scrubber(ScrubRate(10**9)).check(shared)

    async with asyncio.timeout(30):
        with contextlib.suppress(ChunkCorrupt):
            await arriving
        _, path = await home.store.lease(name, holder="s")
    assert {found.read_bytes() for found in path.iterdir()} == {b"shared", b"own"}


async def test_directories_of_a_model_count_as_inodes_before_it_comes_and_after_a_restart(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    def opened(free: int) -> Store:
        floor = DiskFloor(tmp_path, 1, inodes=lambda _: (FLOOR_INODES + free, 10**7))
        return Store.open(
            tmp_path / "w", origin=origin, max_bytes=BUDGET, clock=time.time, floor=floor
        )

    deep = put_model(origin, {f"{n:03d}/f": b"" for n in range(200)})
    with (
        contextlib.closing(opened(100)) as store,
        pytest.raises(StoreFull, match="101 more inodes"),
    ):
        await store.prefetch(deep)
    with contextlib.closing(opened(201)) as store:
        await store.prefetch(deep)
    with contextlib.closing(opened(0)) as store:
        await store.prefetch(put_model(origin, {"v": b"1", "w": b"2"}))
        assert [model.files for model in store.models()] == [2]


async def test_models_of_many_directories_keep_no_other_model_waiting(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    go = threading.Event()
    looks: list[str] = []

    def inodes(path: Path) -> tuple[int, int]:
        if threading.current_thread() is not threading.main_thread():
            looks.append(threading.current_thread().name)
            go.wait(40)
        return 10**6, 10**7

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))
    floor = DiskFloor(tmp_path, 1, inodes=inodes)
    store = Store.open(
        tmp_path / "w", origin=origin, max_bytes=BUDGET, clock=time.time, floor=floor
    )
    try:
        large = [put_model(origin, {f"{n:03d}/{name}": b"" for n in range(200)}) for name in "abcd"]
        asking = [asyncio.create_task(store.prefetch(name)) for name in large]
        await until(lambda: bool(looks))
        small = asyncio.create_task(store.prefetch(put_model(origin, {"w": b"small"})))
        here, _ = await asyncio.wait([small], timeout=30)
        for task in asking:
            task.cancel()
        await asyncio.sleep(0.05)  # those that wait for a thread are told before there is one
        go.set()
        await small
        assert here, "it came while the others were being linked"
        results = await asyncio.gather(*asking, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        assert (len(store.models()), list((tmp_path / "w" / "tmp").iterdir())) == (1, [])
        assert len(looks) <= 2, "none goes on that nobody waits for"
    finally:
        go.set()
        store.close()
