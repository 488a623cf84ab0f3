"""Leases: opened at once, waited for late, ended by a word or with their holder."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.holdings import FakeHoldings
from weight_cache.dram.read_ahead import ReadAhead
from weight_cache.errors import LeaseUnknown, OriginUnavailable
from weight_cache.leases.bandwidth import TierBandwidths
from weight_cache.leases.holders import LeaseHolder, process_start_ticks
from weight_cache.leases.manager import LeaseManager
from weight_cache.types import LoadProgress, OpenedLease, Tier


class Desk:
    """Leases over a fake store, and what they said."""

    def __init__(self, root: Path) -> None:
        self.store = FakeHoldings(root)
        self.bandwidths = TierBandwidths(origin="fake")
        self.ahead = ReadAhead(max_bytes=10**6, observe=self.bandwidths.observe)
        self.fetched: list[tuple[float, float]] = []
        self.leases = self.another()

    def another(self) -> LeaseManager:
        """As after a restart."""
        return LeaseManager(
            self.store,
            bandwidths=self.bandwidths,
            ahead=self.ahead,
            on_fetched=lambda predicted, took: self.fetched.append((predicted, took)),
        )


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    await desk.leases.aclose()
    await desk.ahead.aclose()


Spawn = Callable[[], subprocess.Popen[bytes]]


@pytest.fixture
def child() -> Iterator[Spawn]:
    """Processes that live until their input is closed."""
    with contextlib.ExitStack() as stack:

        def spawn() -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                ["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
            )
            stack.callback(end, process)
            return process

        yield spawn


def end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


async def until(desk: Desk, word: str) -> None:
    async with asyncio.timeout(30):
        while word not in desk.store.diary:
            await asyncio.sleep(0.001)


async def test_model_that_is_here_is_ready_at_once(desk: Desk, tmp_path: Path) -> None:
    opened = await desk.leases.open(desk.store.put("m"), holder="s-1")
    assert (opened.ready, opened.path, opened.tier) == (True, tmp_path / "m", Tier.DRAM)
    assert opened.expected_s == 0
    held = await desk.leases.wait(opened.lease_id)
    assert (held.path, held.manifest, held.tier) == (tmp_path / "m", "m", Tier.DRAM)
    assert repr(desk.leases) == "<LeaseManager 1 open, 0 of them arriving>"
    assert desk.leases.served == {Tier.DRAM: 1}


async def test_opening_again_gives_the_same_lease(desk: Desk) -> None:
    first = await desk.leases.open(desk.store.put("m"), holder="s-1")
    again = await desk.leases.open("m", holder="s-1")
    other = await desk.leases.open("m", holder="s-2")
    assert again == first
    assert other.lease_id != first.lease_id
    assert desk.store.diary == ["lease m start"] * 2


async def test_model_that_is_not_here_is_waited_for_with_progress(
    desk: Desk, tmp_path: Path
) -> None:
    opened = await desk.leases.open("m", holder="s-1")
    assert opened == OpenedLease(
        lease_id=opened.lease_id, manifest="m", ready=False, tier=Tier.ORIGIN
    )
    assert repr(desk.leases) == "<LeaseManager 1 open, 1 of them arriving>"
    seen: list[LoadProgress] = []
    waiting = asyncio.create_task(desk.leases.wait(opened.lease_id, on_progress=seen.append))
    await asyncio.sleep(0)
    desk.store.coming["m"].set()
    held = await waiting
    assert (held.path, held.tier) == (tmp_path / "m", Tier.ORIGIN)
    assert [p.done_bytes for p in seen] == [0, 1000]
    assert len(desk.fetched) == 1
    assert desk.fetched[0][0] == desk.bandwidths.predict({Tier.ORIGIN: 1000})


async def test_held_models_are_read_ahead_while_they_are_held(desk: Desk) -> None:
    first = await desk.leases.open(desk.store.put("m"), holder="s-1")
    second = await desk.leases.open("m", holder="s-2")
    assert desk.ahead.held_bytes == 1000
    await desk.leases.close(first.lease_id)
    assert desk.ahead.held_bytes == 1000
    await desk.leases.close(second.lease_id)
    assert desk.ahead.held_bytes == 0


async def test_closing_ends_a_fetch_and_tells_who_waits(desk: Desk) -> None:
    opened = await desk.leases.open("m", holder="s-1")
    waiting = asyncio.create_task(desk.leases.wait(opened.lease_id))
    await asyncio.sleep(0)
    assert await desk.leases.close(opened.lease_id)
    with pytest.raises(LeaseUnknown, match="was closed"):
        await waiting
    assert desk.store.diary == ["lease m start", "abandoned m", "release"]
    assert not await desk.leases.close(opened.lease_id)


async def test_lease_opened_again_while_it_is_closed_is_a_new_one(desk: Desk) -> None:
    opened = await desk.leases.open(desk.store.put("m"), holder="s-1")
    closing = asyncio.create_task(desk.leases.close(opened.lease_id))
    await asyncio.sleep(0)
    again = await desk.leases.open("m", holder="s-1")
    await closing
    assert desk.store.diary == ["lease m start", "release", "lease m start"]
    assert list(desk.store.held) == [again.lease_id]


async def test_failure_is_told_to_who_waits_and_the_next_open_tries_again(desk: Desk) -> None:
    desk.store.broken["m"] = OriginUnavailable("no such blob")
    opened = await desk.leases.open("m", holder="s-1")
    assert not opened.ready
    with pytest.raises(OriginUnavailable, match="no such blob"):
        await desk.leases.wait(opened.lease_id)
    with pytest.raises(LeaseUnknown):
        await desk.leases.wait(opened.lease_id)
    del desk.store.broken["m"]
    desk.store.put("m")
    assert (await desk.leases.open("m", holder="s-1")).ready


async def test_failures_that_nobody_asks_about_are_bounded(desk: Desk) -> None:
    for number in range(300):
        desk.store.broken[f"m{number}"] = OriginUnavailable("gone")
    opened = [await desk.leases.open(f"m{number}", holder="s") for number in range(300)]
    async with asyncio.timeout(30):
        while repr(desk.leases) != "<LeaseManager 0 open, 0 of them arriving>":
            await asyncio.sleep(0)
    with pytest.raises(LeaseUnknown):
        await desk.leases.wait(opened[0].lease_id)
    with pytest.raises(OriginUnavailable):
        await desk.leases.wait(opened[-1].lease_id)


async def test_caller_that_stops_waiting_ends_nothing(desk: Desk) -> None:
    opened = await desk.leases.open("m", holder="s-1")
    waiting = asyncio.create_task(desk.leases.wait(opened.lease_id))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    desk.store.coming["m"].set()
    assert (await desk.leases.wait(opened.lease_id)).tier is Tier.ORIGIN


async def test_unknown_lease_says_what_to_do(desk: Desk) -> None:
    with pytest.raises(LeaseUnknown, match="Open it again"):
        await desk.leases.wait("l-0")


async def test_model_found_corrupt_while_held_is_fetched_for_who_opens_again(desk: Desk) -> None:
    opened = await desk.leases.open(desk.store.put("m"), holder="s-1")
    desk.store.here.discard("m")
    again = await desk.leases.open("m", holder="s-1")
    assert (again.lease_id, again.ready) == (opened.lease_id, False)
    desk.store.coming["m"].set()
    await desk.leases.wait(again.lease_id)
    assert list(desk.store.held) == [opened.lease_id]


async def test_lease_ends_with_its_process(desk: Desk, child: Spawn) -> None:
    process = child()
    await desk.leases.open(desk.store.put("m"), holder="s-1", pid=process.pid)
    (lease,) = desk.store.held.values()
    assert (lease.pid, lease.pid_started) == (process.pid, process_start_ticks(process.pid))
    await asyncio.to_thread(end, process)
    await until(desk, "release")
    assert desk.store.held == {}
    assert repr(desk.leases) == "<LeaseManager 0 open, 0 of them arriving>"


async def test_fetch_ends_with_the_process_that_wants_it(desk: Desk, child: Spawn) -> None:
    process = child()
    await desk.leases.open("m", holder="s-1", pid=process.pid)
    await asyncio.to_thread(end, process)
    await until(desk, "abandoned m")


async def test_process_that_is_gone_holds_nothing(desk: Desk, child: Spawn) -> None:
    process = child()
    end(process)
    with pytest.raises(LeaseUnknown, match=f"process {process.pid} does not exist"):
        await desk.leases.open(desk.store.put("m"), holder="s-1", pid=process.pid)
    assert desk.store.diary == []


async def test_restart_takes_up_what_was_granted(desk: Desk, child: Spawn, tmp_path: Path) -> None:
    process = child()
    kept = await desk.leases.open(desk.store.put("m"), holder="s-1", pid=process.pid)
    free = await desk.leases.open("m", holder="s-2")
    await desk.leases.aclose()
    desk.leases = desk.another()
    await desk.leases.adopt()
    assert (await desk.leases.wait(kept.lease_id)).path == tmp_path / "m"
    assert (await desk.leases.open("m", holder="s-2")).lease_id == free.lease_id
    await asyncio.to_thread(end, process)
    await until(desk, "release")
    assert list(desk.store.held) == [free.lease_id]


async def test_restart_ends_leases_of_processes_that_ended_meanwhile(
    desk: Desk, child: Spawn
) -> None:
    process = child()
    await desk.leases.open(desk.store.put("m"), holder="s-1", pid=process.pid)
    await desk.leases.aclose()
    end(process)
    desk.leases = desk.another()
    await desk.leases.adopt()
    assert desk.store.held == {}


def test_another_process_of_the_same_pid_is_not_the_holder(child: Spawn) -> None:
    process = child()
    started = process_start_ticks(process.pid)
    assert started is not None
    with pytest.raises(LeaseUnknown):
        LeaseHolder.find(process.pid, started=started - 1)
    end(process)
    assert process_start_ticks(process.pid) is None


async def test_prediction_says_tier_bytes_and_seconds(desk: Desk) -> None:
    here = await desk.leases.predict(desk.store.put("m"))
    assert (here.tier, here.missing, here.seconds) == (Tier.DRAM, {Tier.NVME: 0}, 0)
    nowhere = await desk.leases.predict("other")
    assert (nowhere.tier, nowhere.seconds, nowhere.missing) == (Tier.ORIGIN, None, {})
    desk.store.sizes["other"] = 10**9
    far = await desk.leases.predict("other")
    assert (far.tier, far.missing) == (Tier.ORIGIN, {Tier.ORIGIN: 10**9})
    assert far.seconds == pytest.approx(2.0)


async def test_prediction_counts_what_is_under_way(desk: Desk) -> None:
    desk.store.sizes["other"] = 1000
    alone = (await desk.leases.predict("other")).seconds
    await desk.leases.open("m", holder="s-1")
    await asyncio.sleep(0)
    assert alone is not None
    assert (await desk.leases.predict("other")).seconds == pytest.approx(2 * alone)
