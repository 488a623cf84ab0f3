"""Observations reach the controller once each, whatever becomes of posts; what cannot be kept is
counted as lost."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from activator.call_stats import shipper
from activator.call_stats.observer import CallStats
from activator.call_stats.shipper import KEPT_MINUTES, PendingStats, StatsShipper
from pilotlight.spec.observations import Observation
from tests.fakes.clock import ManualClock
from tests.fakes.routes import spec_of, target_of

TARGETS = [target_of(spec_of(f"f{number}")) for number in range(3)]
NOON = 1_800_000_000.0


class Receiver:
    """Takes posts, refuses them, or takes them and loses its answer."""

    def __init__(self) -> None:
        self.failure: httpx.HTTPError | None = None
        self.loses_answers = False
        self.posts: dict[tuple[str, int], list[Observation]] = {}
        self.is_closed = False

    async def accept(self, body: dict[str, Any]) -> bool:
        """See posting.Receiver."""
        if self.failure is not None:
            raise self.failure
        key = (body["life"], body["sequence"])
        is_new = key not in self.posts
        self.posts.setdefault(key, [Observation.from_json(one) for one in body["observations"]])
        if self.loses_answers:
            raise httpx.ReadTimeout("no answer")
        return is_new

    async def aclose(self) -> None:
        """See posting.Receiver."""
        self.is_closed = True

    def refused(self) -> dict[int, int]:
        """Refused calls by minute, over all posts."""
        sums: dict[int, int] = {}
        for one in (one for post in self.posts.values() for one in post):
            sums[one.minute] = sums.get(one.minute, 0) + one.refused
        return sums


class World:
    def __init__(self) -> None:
        self.clock = ManualClock(NOON)
        self.observer = CallStats()
        self.receiver = Receiver()
        self.posting = StatsShipper(self.observer, self.receiver, activator="a-0", clock=self.clock)

    def call(self, number: int = 0) -> None:
        self.observer.refused(TARGETS[number], 429)

    async def turn(self, seconds: float = 1.0) -> None:
        """A second passes, and what the task does then."""
        self.clock.now += seconds
        self.posting.count()
        await self.posting.post()


@pytest.fixture
def world() -> World:
    return World()


MINUTE = int(NOON // 60)


async def test_what_was_counted_is_posted_under_the_minute_in_which_it_was(world: World) -> None:
    world.clock.now = NOON + 59
    world.posting.count()
    world.call()
    await world.turn()  # it is the next minute now
    world.call()
    await world.turn()
    assert world.receiver.refused() == {MINUTE: 1, MINUTE + 1: 1}


async def test_nothing_is_posted_when_nothing_happened(world: World) -> None:
    await world.turn()
    assert world.receiver.posts == {}


async def test_a_controller_that_is_away_finds_everything_when_it_is_back(world: World) -> None:
    world.receiver.failure = httpx.ConnectError("away")
    for _ in range(30):
        world.call()
        await world.turn(20)
    world.receiver.failure = None
    await world.turn()
    assert sum(world.receiver.refused().values()) == 30
    assert (len(world.receiver.refused()), world.posting.lost) == (10, 0)


async def test_a_post_whose_answer_was_lost_is_sent_again_as_it_was(world: World) -> None:
    world.receiver.loses_answers = True
    world.call()
    await world.turn()
    world.call()
    await world.turn()
    world.receiver.loses_answers = False
    await world.turn()
    assert sum(world.receiver.refused().values()) == 2
    assert [sequence for _, sequence in world.receiver.posts] == [1, 2]


async def test_after_a_quarter_of_an_hour_the_oldest_minutes_go(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.receiver.failure = httpx.ConnectError("away")
    for _ in range(20):
        world.call()
        await world.turn(60)
    world.receiver.failure = None
    await world.turn()
    assert set(world.receiver.refused()) == set(range(MINUTE + 20 - KEPT_MINUTES, MINUTE + 20))
    assert world.posting.lost == 5
    assert "observations_lost" in caplog.text


async def test_what_the_controller_will_never_understand_does_not_hold_up_the_rest(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    request = httpx.Request("POST", "http://controller")
    world.receiver.failure = httpx.HTTPStatusError(
        "400", request=request, response=httpx.Response(400, request=request)
    )
    world.call()
    await world.turn()
    world.receiver.failure = None
    world.call()
    await world.turn()
    assert (world.receiver.refused(), world.posting.lost) == ({MINUTE: 1}, 1)
    assert "observations_refused" in caplog.text


async def test_a_clock_that_jumps_back_moves_nothing_into_the_future(world: World) -> None:
    world.call()
    await world.turn(-3600)
    assert set(world.receiver.refused()) == {MINUTE - 60}


async def test_what_is_left_at_the_end_is_posted(world: World) -> None:
    world.call()
    await world.posting.aclose()
    assert (world.receiver.refused(), world.receiver.is_closed) == ({MINUTE: 1}, True)


async def test_large_heaps_go_in_batches(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipper, "BATCH", 2)
    for number in range(3):
        world.call(number)
    await world.turn()
    assert [len(post) for post in world.receiver.posts.values()] == [2, 1]


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipper, "MAX_KEPT", 3)
    kept = PendingStats()
    kept.add(
        Observation(tenant="t", function_id="f", revision="v", minute=minute, refused=1)
        for minute in (5, 1, 2, 9, 7)
    )
    assert kept.drop_old(before=2) == 2
    assert [one.minute for one in kept.pop(10)] == [5, 7, 9]
