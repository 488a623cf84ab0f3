"""What rots on the disk is found at a bounded pace, when nobody else reads, and never served
again."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.origins import MemoryOrigin
from tests.fakes.waiting import until
from tests.weight_cache.models import digest_of, put_model
from weight_cache.fetch.read_scheduler import ReadScheduler
from weight_cache.store.scrubber import PIECE_BYTES, ROUND_S, ScrubRate
from weight_cache.store.store import Store
from weight_cache.types import ReadPriority

FILES = {f"f{i}": bytes([i]) * (PIECE_BYTES // 2 + i) for i in range(3)}


class Pace:
    """A clock that only sleeping moves; `stop` ends the scrubber's run after so many sleeps."""

    def __init__(self, *, stop_after: int = 10**9) -> None:
        self.now = 50.0
        self.slept: list[float] = []
        self._stop_after = stop_after

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += max(0.0, seconds)
        if len(self.slept) >= self._stop_after:
            raise asyncio.CancelledError
        await asyncio.sleep(0)


@pytest.fixture
def origin() -> MemoryOrigin:
    return MemoryOrigin()


@pytest.fixture
def lanes() -> ReadScheduler:
    return ReadScheduler(4, 0.25)


@pytest.fixture
def store(tmp_path: Path, origin: MemoryOrigin, lanes: ReadScheduler) -> Iterator[Store]:
    opened = Store.open(
        tmp_path / "w", origin=origin, max_bytes=10**9, clock=time.time, lanes=lanes
    )
    yield opened
    opened.close()


def rot(path: Path, *, at: int = 7) -> None:
    """One bit flips, and nothing else: neither size nor times nor mode tell."""
    before = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 1]))
        stream.flush()
        os.fsync(stream.fileno())
    path.chmod(0o444)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


async def go_round(store: Store, *, pieces: int, pace: Pace | None = None) -> Pace:
    pace = pace or Pace(stop_after=pieces)
    with pytest.raises(asyncio.CancelledError):
        await store.scrubber(ScrubRate(PIECE_BYTES, sleep=pace.sleep, clock=pace.clock)).run()
    return pace


async def test_rotten_file_is_set_aside_and_fetched_again_when_asked_for(
    tmp_path: Path, store: Store, origin: MemoryOrigin
) -> None:
    name = put_model(origin, FILES)
    lease, path = await store.lease(name, holder="s")
    rot(path / "f1")
    assert (await store.lease(name, holder="s"))[0] == lease  # nobody can see it without reading
    await go_round(store, pieces=7)  # two for each file, and one more
    assert [p.name for p in (tmp_path / "w" / "quarantine").iterdir()] == [digest_of(FILES["f1"])]
    assert (store.is_here(name), store.statistics().quarantined_files) == (False, 1)
    before = origin.read_bytes
    _, path = await store.lease(name, holder="s")
    assert {p.name: p.read_bytes() for p in path.iterdir()} == FILES
    assert origin.read_bytes - before == len(FILES["f1"])


async def test_pace_is_kept_whatever_was_missed(store: Store, origin: MemoryOrigin) -> None:
    await store.prefetch(put_model(origin, FILES))
    pace = Pace(stop_after=3)
    begun = pace.now
    await go_round(store, pieces=3, pace=pace)
    first = store.statistics().scrubbed_bytes
    assert pace.now - begun == pytest.approx(first / PIECE_BYTES)
    pace.now += 100_000  # suspended over night
    again = Pace(stop_after=3)
    again.now = pace.now
    await go_round(store, pieces=3, pace=again)
    assert again.now - pace.now == pytest.approx(
        (store.statistics().scrubbed_bytes - first) / PIECE_BYTES
    )


async def test_small_store_is_read_once_in_an_hour(store: Store, origin: MemoryOrigin) -> None:
    await store.prefetch(put_model(origin, FILES))
    # two for each file, the pause, and the first piece of the next round
    pace = await go_round(store, pieces=8)
    assert pace.slept[6] == pytest.approx(ROUND_S - sum(pace.slept[:6]))
    assert store.statistics().scrubbed_bytes == sum(
        len(content) for content in FILES.values()
    ) + len(min(FILES.values(), key=digest_of))


async def test_position_is_remembered_over_restarts(
    tmp_path: Path, store: Store, origin: MemoryOrigin
) -> None:
    await store.prefetch(put_model(origin, FILES))
    order = sorted(digest_of(content) for content in FILES.values())
    await go_round(store, pieces=3)  # the first file: a piece, its end; and a piece of the second
    assert (tmp_path / "w" / "scrubbed").read_text() == order[0]
    assert repr(store.scrubber(ScrubRate(5))) == f"<Scrubber after={order[0][:12]} 5 bytes/s>"
    store.close()
    again = Store.open(tmp_path / "w", origin=origin, max_bytes=10**9, clock=time.time)
    await go_round(again, pieces=3)
    assert (tmp_path / "w" / "scrubbed").read_text() == order[1]
    await go_round(again, pieces=3)
    assert (tmp_path / "w" / "scrubbed").read_text() == order[2]
    await go_round(again, pieces=4)  # one pause between two rounds
    assert (tmp_path / "w" / "scrubbed").read_text() == order[0]
    again.close()


async def test_it_waits_while_anybody_reads(
    store: Store, origin: MemoryOrigin, lanes: ReadScheduler
) -> None:
    await store.prefetch(put_model(origin, FILES))
    pace = Pace()
    async with lanes.turn(lambda: ReadPriority.PREFETCH):
        task = asyncio.create_task(
            store.scrubber(ScrubRate(PIECE_BYTES, sleep=pace.sleep, clock=pace.clock)).run()
        )
        await until(lambda: lanes.waiting(ReadPriority.SCRUB) == 1)
        assert store.statistics().scrubbed_bytes == 0
    await until(lambda: store.statistics().scrubbed_bytes > 0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_missing_and_unreadable_files(
    tmp_path: Path, store: Store, origin: MemoryOrigin
) -> None:
    name = put_model(origin, {"a": b"x" * 100})
    await store.prefetch(name)
    scrubber = store.scrubber(ScrubRate(PIECE_BYTES, sleep=Pace().sleep))
    assert await scrubber.check("0" * 64) is True  # evicted a moment ago
    digest = digest_of(b"x" * 100)
    (tmp_path / "w" / "files" / digest).unlink()
    # a directory cannot be read: EISDIR, as a broken disk says EIO
    (tmp_path / "w" / "files" / digest).mkdir()
    assert await scrubber.check(digest) is False
    assert not store.is_here(name)


async def test_pace_of_nothing_and_a_store_of_nothing(store: Store) -> None:
    await store.scrubber(ScrubRate(0)).run()
    pace = await go_round(store, pieces=2)
    assert pace.slept == [ROUND_S, ROUND_S]
