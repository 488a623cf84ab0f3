"""A caller who waits reads first, prefetches have their share, checking waits for everybody."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_cache.fetch.read_scheduler import ReadScheduler, highest_priority
from weight_cache.types import ReadPriority

START, PREFETCH, SCRUB = ReadPriority


class Crowd:
    """Takes turns and keeps them until told; `running` and `order` say who has one and who came
    when."""

    def __init__(self, lanes: ReadScheduler) -> None:
        self.lanes = lanes
        self.order: list[str] = []
        self.running: set[str] = set()
        self.lane: dict[str, ReadPriority] = {}
        self._done: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, name: str, lane: ReadPriority) -> None:
        self.lane[name] = lane
        self._done[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._take(name))
        await self.turn_round()

    async def end(self, name: str) -> None:
        self._done[name].set()
        await self.turn_round()

    async def leave(self, name: str) -> None:
        self._tasks[name].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._tasks[name]
        await self.turn_round()

    async def all_end(self) -> None:
        for done in self._done.values():
            done.set()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def turn_round(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)

    async def _take(self, name: str) -> None:
        async with self.lanes.turn(lambda: self.lane[name]):
            self.order.append(name)
            self.running.add(name)
            try:
                await self._done[name].wait()
            finally:
                self.running.discard(name)


async def test_a_start_goes_before_prefetches_that_came_earlier() -> None:
    crowd = Crowd(ReadScheduler(1, 1.0))
    for name, lane in (("a", PREFETCH), ("b", PREFETCH), ("s", START)):
        await crowd.ask(name, lane)
    assert repr(crowd.lanes) == "<ReadScheduler 1/1 start=0+1 prefetch=1+1 scrub=0+0>"
    await crowd.end("a")
    assert crowd.running == {"s"}
    await crowd.all_end()
    assert crowd.order == ["a", "s", "b"]


async def test_prefetches_have_all_the_turns_alone_and_their_share_beside_a_start() -> None:
    crowd = Crowd(ReadScheduler(8, 0.25))
    for i in range(10):
        await crowd.ask(f"p{i}", PREFETCH)
    assert len(crowd.running) == 8
    await crowd.ask("s", START)
    await crowd.end("p0")
    assert "s" in crowd.running
    for i in range(1, 8):
        await crowd.end(f"p{i}")
    assert crowd.running == {"s", "p8", "p9"}
    await crowd.ask("p10", PREFETCH)
    assert "p10" not in crowd.running
    await crowd.end("s")
    assert "p10" in crowd.running
    await crowd.all_end()


async def test_the_share_is_at_least_one() -> None:
    crowd = Crowd(ReadScheduler(2, 0.01))
    await crowd.ask("s", START)
    await crowd.ask("p", PREFETCH)
    assert crowd.running == {"s", "p"}
    await crowd.all_end()


async def test_scrubbing_has_one_turn_and_only_when_nobody_else_reads_or_waits() -> None:
    crowd = Crowd(ReadScheduler(4, 0.25))
    await crowd.ask("p", PREFETCH)
    await crowd.ask("x", SCRUB)
    await crowd.ask("y", SCRUB)
    assert crowd.running == {"p"}
    await crowd.end("p")
    assert crowd.running == {"x"}
    await crowd.ask("s", START)
    assert crowd.running == {"x", "s"}
    await crowd.end("x")
    assert crowd.running == {"s"}
    await crowd.all_end()


async def test_what_becomes_urgent_is_let_in_at_the_next_review() -> None:
    crowd = Crowd(ReadScheduler(4, 0.25))
    await crowd.ask("s", START)
    await crowd.ask("p", PREFETCH)
    await crowd.ask("q", PREFETCH)
    assert crowd.running == {"s", "p"}
    crowd.lane["q"] = START
    crowd.lanes.review()
    await crowd.turn_round()
    assert crowd.running == {"s", "p", "q"}
    await crowd.all_end()


async def test_who_leaves_waiting_or_reading_leaves_no_turn_taken() -> None:
    crowd = Crowd(ReadScheduler(1, 1.0))
    await crowd.ask("a", START)
    await crowd.ask("b", START)
    await crowd.ask("c", START)
    await crowd.leave("b")
    await crowd.leave("a")
    assert crowd.running == {"c"}
    await crowd.all_end()
    assert repr(crowd.lanes) == "<ReadScheduler 0/1 start=0+0 prefetch=0+0 scrub=0+0>"


async def test_a_turn_given_in_the_moment_of_a_cancellation_is_given_on() -> None:
    crowd = Crowd(ReadScheduler(1, 1.0))
    await crowd.ask("a", START)
    waiting = asyncio.create_task(crowd.ask("b", START))
    await crowd.turn_round()
    await waiting
    crowd._done["a"].set()
    await asyncio.sleep(0)  # a's turn is being given to b, which has not run yet
    await crowd.leave("b")
    await crowd.ask("c", START)
    assert crowd.running == {"c"}
    await crowd.all_end()


@pytest.mark.parametrize(
    "lanes, most", [([SCRUB, START], START), ([SCRUB, PREFETCH], PREFETCH), ([], SCRUB)]
)
def test_most_urgent(lanes: list[ReadPriority], most: ReadPriority) -> None:
    assert highest_priority(lanes) is most


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ask", "end", "leave", "promote"]),
            st.integers(0, 9),
            st.sampled_from(list(ReadPriority)),
        ),
        max_size=40,
    )
)
def test_any_order_keeps_the_bound_starves_no_start_and_ends_empty(
    steps: list[tuple[str, int, ReadPriority]],
) -> None:
    async def story() -> None:
        crowd = Crowd(ReadScheduler(3, 0.34))
        names: list[str] = []
        for step, index, lane in steps:
            if step == "ask":
                names.append(f"n{len(names)}")
                await crowd.ask(names[-1], lane)
            elif names:
                name = names[index % len(names)]
                if step == "promote":
                    crowd.lane[name] = START
                    crowd.lanes.review()
                    await crowd.turn_round()
                else:
                    await (crowd.end(name) if step == "end" else crowd.leave(name))
            assert len(crowd.running) <= 3
            assert not crowd.lanes.waiting(START) or len(crowd.running) == 3
            assert not (crowd.lanes.waiting(PREFETCH) and not crowd.running)
        await crowd.all_end()
        assert repr(crowd.lanes) == "<ReadScheduler 0/3 start=0+0 prefetch=0+0 scrub=0+0>"

    asyncio.run(story())
