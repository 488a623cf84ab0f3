"""An attempt ends exactly once, whatever happens to it and in whichever order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.balancing.instance import Reservation
from activator.billing.errors import JournalFull
from activator.calls.attempt import Attempt
from activator.resilience.breaker import Outcome
from activator.worker_client.connection import WorkerConnectionLost, WorkerResponse
from pilotlight import errors
from pilotlight.spec.function import Clocks
from snapshotter.types import StartKind
from tests.fakes.calls import call_of
from tests.fakes.routes import spec_of, target_of


class Account:
    """Records of one instance: open and closed ones."""

    def __init__(self) -> None:
        self.opened = 0
        self.closed: list[tuple[int, str]] = []
        self.failure: Exception | None = None

    def open(self, **_: object) -> SimpleNamespace:
        if self.failure is not None:
            raise self.failure
        self.opened += 1
        return SimpleNamespace(mark="")

    def close(self, _: object, *, status: int, outcome: str, **more: object) -> SimpleNamespace:
        self.closed.append((status, outcome))
        return SimpleNamespace(cost="1", picos=10**12)


class Connection:
    """A connection to a worker that answers when the test says so."""

    def __init__(self) -> None:
        self.is_ahead = False
        self.is_closed = False
        self.pending: asyncio.Future[WorkerResponse] | None = None

    def request(
        self, _: bytes, *, loop: asyncio.AbstractEventLoop, **more: object
    ) -> asyncio.Future[WorkerResponse]:
        self.pending = loop.create_future()
        return self.pending

    def close(self) -> None:
        self.is_closed = True


class Pool:
    """Hands out one connection, and counts its returns."""

    def __init__(self) -> None:
        self.connection = Connection()
        self.released = 0

    def acquire_nowait(self, _: float) -> Connection:
        return self.connection

    def release(self, _: Connection, now: float) -> None:
        self.released += 1


class Slots:
    """The owner of the slot: its releases and drains."""

    def __init__(self) -> None:
        self.released: list[Outcome] = []
        self.drained = 0

    def release(self, _: object, ending: Outcome = Outcome.ANSWERED) -> None:
        self.released.append(ending)

    def drain(self, _: object) -> None:
        self.drained += 1


class World:
    """An attempt on an instance of the test."""

    def __init__(self, **clocks: float) -> None:
        self.account, self.pool, self.slots = Account(), Pool(), Slots()
        instance: Any = SimpleNamespace(
            running={}, account=self.account, connections=self.pool, is_stuck=False, id="i-1"
        )
        self.instance = instance
        target = target_of(spec_of(clocks=Clocks(**clocks)))
        self.call = call_of(target)
        self.call.reserved_ns = self.call.received_ns
        reservation = Reservation(self.slots, instance, StartKind.WARM, 0.0)
        self.attempt = Attempt(self.call, reservation)

    async def begin(self, *, is_stream: bool) -> None:
        """Open it, send it, and let the worker answer."""
        connection = await self.attempt.open()
        asking = asyncio.create_task(self.attempt.request_whole(connection))
        await asyncio.sleep(0)
        self.answer(is_stream=is_stream)
        await asking

    def answer(self, *, is_stream: bool) -> None:
        assert self.pool.connection.pending is not None
        body = None if is_stream else b"{}"
        self.pool.connection.pending.set_result(WorkerResponse(None, 200, [], body))


ENDINGS = {
    "ok": lambda a: a.close(status=200, outcome="ok", bytes_out=2),
    "raised": lambda a: a.close(status=500, outcome="error", bytes_out=2),
    "busy": lambda a: a.close(status=503, outcome="busy", bytes_out=0),
    "disconnect": lambda a: a.fail(asyncio.CancelledError()),
    "crash": lambda a: a.fail(WorkerConnectionLost("gone", sent=True)),
    "unsent": lambda a: a.fail(WorkerConnectionLost("gone", sent=False)),
    "refused": lambda a: a.fail(errors.InvalidInput("too slow")),
    "overrun": lambda a: a._overrun(),
    "caller's deadline": lambda a: a._on_caller_deadline(),
}


@given(
    endings=st.lists(st.sampled_from(sorted(ENDINGS)), min_size=1, max_size=5),
    is_stream=st.booleans(),
    deadline_s=st.none() | st.just(5.0),
)
def test_whatever_ends_it_in_whatever_order_it_ends_once(
    endings: Sequence[str], is_stream: bool, deadline_s: float | None
) -> None:
    async def run() -> World:
        world = World()
        world.call.deadline_s = deadline_s if "caller's deadline" not in endings else 5.0
        await world.begin(is_stream=is_stream)
        for ending in endings:
            ENDINGS[ending](world.attempt)
        if not world.attempt.is_closed:  # a deadline takes a response that arrived before it
            assert not is_stream
            ENDINGS["ok"](world.attempt)
        return world

    world = asyncio.run(run())
    assert world.account.opened == len(world.account.closed) == 1
    assert (len(world.slots.released), world.pool.released) == (1, 1)
    assert world.slots.drained == (is_stream and endings[0] == "overrun")
    assert world.attempt._timer is not None
    assert world.attempt._timer.cancelled() or world.attempt._timer.when() == 0 or is_stream


@pytest.mark.parametrize("ending", ["busy", "unsent"])
async def test_an_attempt_in_which_nothing_ran_says_nothing_about_the_function(ending: str) -> None:
    world = World()
    await world.begin(is_stream=False)
    ENDINGS[ending](world.attempt)
    assert [outcome for _, outcome in world.account.closed] == [ending]
    assert world.slots.released == [Outcome.NEITHER]


@pytest.mark.parametrize("failure", [JournalFull("full"), errors.OverBudget("spent")])
async def test_an_attempt_without_a_record_frees_its_slot_alone(failure: Exception) -> None:
    world = World()
    world.account.failure = failure
    with pytest.raises(type(failure)) as raised:
        await world.attempt.open()
    world.attempt.fail(raised.value)
    assert (world.account.opened, world.account.closed) == (0, [])
    assert (world.slots.released, world.pool.released) == ([Outcome.NEITHER], 0)


async def test_a_deadline_before_the_response_is_raised_and_drains_before_the_slot_is_free() -> (
    None
):
    world = World(execution_s=0.01)
    connection = await world.attempt.open()
    with pytest.raises(errors.DeadlineExceeded, match=r"longer than 0\.01 s") as late:
        await world.attempt.request_whole(connection)
    assert (world.slots.drained, world.slots.released) == (1, [])
    world.attempt.fail(late.value)
    assert world.account.closed == [(504, "error")]
    assert world.slots.released == [Outcome.FAILED]
    assert world.instance.is_stuck
    assert world.pool.connection.is_closed


async def test_a_stream_that_the_caller_does_not_read_is_no_fault_of_the_instance() -> None:
    world = World()
    await world.begin(is_stream=True)
    world.pool.connection.is_ahead = True
    cut: list[str] = []
    world.attempt.on_cut = lambda: cut.append("cut")
    world.attempt._overrun()
    assert world.account.closed == [(504, "error")]
    assert (world.slots.drained, world.slots.released) == (0, [Outcome.NEITHER])
    assert cut == ["cut"]
    assert not world.instance.is_stuck


async def test_a_response_that_arrives_with_the_deadline_is_taken() -> None:
    world = World()
    connection = await world.attempt.open()
    asking = asyncio.create_task(world.attempt.request_whole(connection))
    await asyncio.sleep(0)
    world.answer(is_stream=False)
    world.attempt._overrun()
    assert (await asking).status == 200
    assert world.attempt.close(status=200, outcome="ok", bytes_out=2) == "1"
    assert (world.slots.drained, world.account.closed) == (0, [(200, "ok")])


async def test_the_end_of_a_block_over_the_deadline_names_what_ran_too_long() -> None:
    world = World(execution_s=0.01)
    await world.attempt.open()

    async def upload() -> None:
        async with world.attempt.limited("the upload"):
            world.attempt.is_sending = True
            await asyncio.sleep(60)

    with pytest.raises(errors.DeadlineExceeded, match=r"the upload ran longer") as late:
        await upload()
    world.attempt.fail(late.value)
    assert (world.slots.drained, world.slots.released) == (0, [Outcome.NEITHER])
