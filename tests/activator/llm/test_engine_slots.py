"""The slots of an engine among those who share it: calls beyond them wait here, and are handed
slots in turns by their tokens."""

from __future__ import annotations

import asyncio
import heapq
import random
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from activator.balancing.global_queue import GlobalQueue
from activator.balancing.instance import Reservation
from activator.balancing.instance_lifecycle import InstanceProvisioner
from activator.fairness.fair_queue import FairQueue
from activator.fairness.queue_priority import QueuePriority
from activator.fairness.start_admission import StartAdmission
from activator.llm.engine_throttler import EngineThrottler
from activator.metrics.metrics import Metrics
from activator.quotas.token_reservation import TokenReservation
from pilotlight import errors
from pilotlight.spec.identifiers import Priority
from pilotlight.spec.instances.scaling import Scaling
from tests.activator.balancing.test_wait_queue import BareFleet
from tests.activator.llm.asking import model
from tests.activator.scaled_world import books_of
from tests.activator.test_gateway import until
from tests.fakes.clock import ManualClock
from tests.fakes.routes import target_of

SLOTS = 16
PREFILL_S = 0.2
TOKEN_S = 0.01


def rank_of(tenant: str, tokens: int, weight: int = 1) -> QueuePriority:
    use = TokenReservation(estimated_in=0, max_out=tokens, began_ns=0)
    return use.rank(QueuePriority(priority=Priority.STANDARD, tenant=tenant, weight=weight))


def served(queue: FairQueue[str], calls: int) -> list[str]:
    return [queue.pop() or "" for _ in range(calls)]


def test_turns_are_of_tokens_not_of_calls() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(8):
        queue.push("long", rank := rank_of("long", 1000), cost=rank.cost)
    for _ in range(40):
        queue.push("short", rank := rank_of("short", 100), cost=rank.cost)
    first = served(queue, 22)
    assert (first.count("long"), first.count("short")) == (2, 20)


def test_a_heavier_tenant_gets_more_tokens() -> None:
    queue: FairQueue[str] = FairQueue()
    for tenant, weight in (("heavy", 3), ("light", 1)):
        for _ in range(40):
            queue.push(tenant, rank := rank_of(tenant, 500, weight), cost=rank.cost)
    assert served(queue, 40).count("heavy") == 30


@dataclass
class Engine:
    """A throttler with one instance, whose calls take as long as their answers are, on a clock that
    jumps from event to event."""

    throttler: EngineThrottler
    clock: ManualClock
    ends: list[tuple[float, int, Reservation]] = field(default_factory=list)
    waits_s: dict[str, list[float]] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _n: int = 0

    def call(self, tenant: str, tokens: int, weight: int = 1) -> None:
        """One call comes now."""
        task = asyncio.create_task(self._run(rank_of(tenant, tokens, weight), tokens, self.clock()))
        self.tasks.add(task)

    async def _run(self, rank: QueuePriority, tokens: int, came: float) -> None:
        reservation = await self.throttler.reserve(60, rank)
        self.waits_s.setdefault(rank.tenant, []).append(self.clock() - came)
        self._n += 1
        heapq.heappush(
            self.ends, (self.clock() + PREFILL_S + tokens * TOKEN_S, self._n, reservation)
        )

    async def go_until(self, now: float) -> None:
        """Let calls end until then."""
        await _turns()
        while self.ends and self.ends[0][0] <= now:
            at, _, reservation = heapq.heappop(self.ends)
            self.clock.now = at
            reservation.release()
            await _turns()
        self.clock.now = now


async def _turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


@asynccontextmanager
async def engine_of(*, max_queued: int = 2000, **limits: Any) -> AsyncIterator[Engine]:
    scaling = Scaling(max_instances=1, max_inputs=SLOTS, max_queued=max_queued)
    clock = ManualClock()
    with tempfile.TemporaryDirectory(prefix="pl") as directory:
        books = books_of(Path(directory))
        throttler = EngineThrottler(
            target_of(model(scaling=scaling, **limits)),
            provisioner=InstanceProvisioner(
                BareFleet(Path(directory)),
                secret_env=lambda _: {},
                gate=StartAdmission(clock=clock),
            ),
            queue=GlobalQueue(10_000),
            observer=Metrics(),
            account=books.account,
            clock=clock,
        )
        engine = Engine(throttler, clock)
        try:
            (await throttler.reserve(5)).release()  # it is up
            yield engine
        finally:
            for task in engine.tasks:
                task.cancel()
            await asyncio.gather(*engine.tasks, return_exceptions=True)
            await throttler.aclose()
            await books.aclose()


async def _first_tokens_s(
    *, flood: int, longest: int, weight: int, own: int, every_s: float
) -> list[float]:
    """From the request to the first token of a tenant that asks now and then for `own` tokens,
    beside one that asks `flood` times at once for up to `longest` of them."""
    async with engine_of() as engine:
        rng = random.Random(11)
        for _ in range(flood):
            engine.call("flood", rng.randrange(20, longest), weight)
        await engine.go_until(engine.clock() + 3)
        for _ in range(20):
            engine.call("victim", own)
            await engine.go_until(engine.clock() + every_s)
        await engine.go_until(engine.clock() + 5)
        waits = engine.waits_s["victim"]
        assert len(waits) == 20
        assert engine.throttler.in_flight <= SLOTS
        return [wait + PREFILL_S for wait in waits]


@pytest.mark.parametrize(
    "flood",
    [
        pytest.param({"longest": 200, "weight": 1, "own": 60, "every_s": 0.25}, id="alike"),
        pytest.param(
            {"longest": 100, "weight": 1, "own": 150, "every_s": 0.5}, id="with shorter answers"
        ),
        pytest.param(
            {"longest": 200, "weight": 16, "own": 60, "every_s": 2.0}, id="with a heavier plan"
        ),
    ],
)
async def test_who_floods_an_engine_does_not_double_anothers_time_to_the_first_token(
    flood: dict[str, Any],
) -> None:
    alone = await _first_tokens_s(flood=0, **flood)
    beside = await _first_tokens_s(flood=900, **flood)
    assert sum(alone) / 20 == pytest.approx(PREFILL_S)
    assert sum(beside) <= 2 * sum(alone)


async def test_an_engine_gets_no_more_calls_than_it_has_slots() -> None:
    async with engine_of() as engine:
        for _ in range(SLOTS + 5):
            engine.call("a", 10)
        await _turns()
        assert (engine.throttler.in_flight, engine.throttler.waiting) == (SLOTS, 5)


async def test_a_function_runs_no_more_calls_at_once_than_it_says_and_the_others_wait() -> None:
    async with engine_of(max_streams=3) as engine:
        for _ in range(8):
            engine.call("a", 10)
        await _turns()
        assert (engine.throttler.in_flight, engine.throttler.waiting) == (3, 5)
        await engine.go_until(engine.clock() + 5)
        assert (len(engine.waits_s["a"]), engine.throttler.in_flight) == (8, 0)


async def test_a_thousand_streams_wait_and_each_is_served_once() -> None:
    async with engine_of(max_queued=1000) as engine:
        for n in range(SLOTS + 1000):
            engine.call(f"t-{n % 7}", 10)
        await until(lambda: engine.throttler.waiting == 1000)
        with pytest.raises(errors.TooManyRequests, match="1000 calls waiting"):
            await engine.throttler.reserve(60, rank_of("t-0", 10))
        await engine.go_until(engine.clock() + 60)
        assert sum(map(len, engine.waits_s.values())) == SLOTS + 1000
        assert (engine.throttler.in_flight, engine.throttler.waiting) == (0, 0)


async def test_streams_that_are_given_up_while_they_wait_leave_nothing() -> None:
    async with engine_of() as engine:
        for _ in range(SLOTS + 200):
            engine.call("a", 10)
        await until(lambda: engine.throttler.waiting == 200)
        for task in engine.tasks:
            task.cancel()
        await _turns()
        assert engine.throttler.waiting == 0
        await engine.go_until(engine.clock() + 5)
        assert engine.throttler.in_flight == 0
