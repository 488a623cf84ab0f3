"""Retries that a function declares, through the whole edge: what is tried again, how often, and
what each attempt costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from activator.calls.call import Call
from activator.calls.fallback import FallbackResponse
from activator.calls.runner import RetryExecutor
from activator.quotas.admission import Admission
from activator.resilience.breaker import BreakerTerms
from activator.resilience.declared_retries import BURST, RetryBudgets
from activator.settings import ActivatorSettings
from activator.worker_client.connection import WorkerResponse
from pilotlight.spec.policies import Fallback, RetryPolicy
from tests.activator.conftest import Edge
from tests.activator.test_gateway import forever, problem_of, until
from tests.fakes.calls import call_of
from tests.fakes.fake_worker import Flaky, Script, WorkerAnswer, WorkerRequest, echo
from tests.fakes.routes import TENANT, route_of, spec_of, target_of

AT_ONCE = RetryPolicy(max_retries=3, initial_delay_s=0.001, max_delay_s=0.002)
IN_A_TASK = {"pilotlight-timeout": "20"}
"""A clock of the caller's own keeps a call off the warm path."""


class Crashing:
    """Its instance dies under each call."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self.kills: list[asyncio.Task[None]] = []

    async def __call__(self, request: WorkerRequest) -> WorkerAnswer:
        self.kills.append(
            asyncio.create_task(self._edge.fleet.kill(self._edge.fleet.started[-1], "killed"))
        )
        return await forever(request)


async def warmed(
    edge: Edge, retries: RetryPolicy | None = AT_ONCE, fallback: tuple[Fallback, ...] = ()
) -> None:
    edge.add(route_of(spec_of(retries=retries, fallback=fallback)))
    await edge.call(json={"x": 0})


@pytest.mark.parametrize("headers", [{}, IN_A_TASK], ids=["warm", "in a task"])
async def test_what_user_code_raised_is_tried_again_and_each_attempt_is_charged(
    edge: Edge, script: Script, headers: dict[str, str]
) -> None:
    await warmed(edge)
    script.now = flaky = Flaky(2)
    answer = await edge.call(json={"x": 1}, headers=headers)
    records = [
        r for r in (await edge.settle()).values() if r.call == answer.headers["x-request-id"]
    ]

    assert (answer.status_code, answer.json()) == (200, {"x": 1})
    assert flaky.attempts == ["1", "2", "3"], "the function is told which attempt it is"
    assert sorted((r.attempt, r.status) for r in records) == [(1, 500), (2, 500), (3, 200)]


async def test_after_the_last_retry_the_failure_stands(edge: Edge, script: Script) -> None:
    await warmed(edge)
    script.now = flaky = Flaky(99)
    answer = await edge.call(json={"x": 1})

    assert (answer.status_code, len(flaky.attempts)) == (500, 4)


async def test_nothing_is_tried_again_that_did_not_ask_for_it(edge: Edge, script: Script) -> None:
    await warmed(edge, None)
    script.now = flaky = Flaky(1)

    assert (await edge.call(json={"x": 1})).status_code == 500
    assert len(flaky.attempts) == 1


async def test_refusals_are_not_tried_again(edge: Edge, script: Script) -> None:
    await warmed(edge)
    script.now = flaky = Flaky(0)

    assert (await edge.call(json={"x": "one"})).status_code == 400
    assert flaky.attempts == []


@pytest.mark.parametrize("headers", [{}, IN_A_TASK], ids=["warm", "in a task"])
async def test_a_policy_is_consent_to_run_a_call_again_whose_worker_died(
    edge: Edge, script: Script, headers: dict[str, str]
) -> None:
    await warmed(edge)
    script.now = forever
    task = asyncio.create_task(edge.call(json={"x": 1}, headers=headers))
    await until(lambda: sum(len(worker.requests) for worker in edge.fleet.workers.values()) >= 2)
    script.now = echo
    await edge.fleet.kill(edge.fleet.started[0], "out_of_memory")

    assert (await task).json() == {"x": 1}


async def test_nothing_is_tried_again_past_the_callers_deadline(edge: Edge, script: Script) -> None:
    await warmed(edge, RetryPolicy(max_retries=3, initial_delay_s=30, jitter=0))
    script.now = flaky = Flaky(1)
    answer = await edge.call(json={"x": 1}, headers={"pilotlight-timeout": "20"})

    assert (answer.status_code, len(flaky.attempts)) == (500, 1)


async def test_a_stream_that_breaks_is_not_begun_again(edge: Edge, script: Script) -> None:
    await warmed(edge)
    streams = 0

    async def break_off(request: WorkerRequest) -> WorkerAnswer:
        nonlocal streams
        streams += 1
        return WorkerAnswer(chunks=_half(edge))

    script.now = break_off
    with pytest.raises(httpx.RemoteProtocolError):
        await edge.call(json={"x": 1})
    assert streams == 1


async def _half(edge: Edge) -> AsyncIterator[bytes]:
    yield b"1\n"
    await edge.fleet.kill(edge.fleet.started[0], "killed")
    await asyncio.Event().wait()


async def test_retries_cannot_storm(edge: Edge, script: Script) -> None:
    await warmed(edge)
    script.now = flaky = Flaky(10_000)
    calls = 40
    for _ in range(calls):
        assert (await edge.call(json={"x": 1})).status_code == 500

    retries = len(flaky.attempts) - calls
    assert retries <= BURST + 0.2 * (calls + 1) + 1, (
        "a share of the calls, where each asked for three"
    )


async def test_a_retry_is_a_request_more_to_the_callers_quota(edge: Edge, script: Script) -> None:
    edge.add_key("pl_two", quotas={"requests_per_s": 0.001, "burst": 3})
    await warmed(edge)
    script.now = flaky = Flaky(99)
    answer = await edge.call(key="pl_two", json={"x": 1})

    assert (answer.status_code, len(flaky.attempts)) == (500, 3), (
        "the failure is told, not that it cannot be tried again"
    )
    assert (await edge.call(key="pl_two", json={"x": 1})).status_code == 429


async def test_the_slot_is_free_while_a_retry_waits(edge: Edge, script: Script) -> None:
    await warmed(edge, RetryPolicy(max_retries=1, initial_delay_s=30, max_delay_s=30, jitter=0))
    script.now = Flaky(1)
    waiting = asyncio.create_task(edge.call(json={"x": 1}))
    (scaled,) = edge.scaler.revisions.values()
    await until(
        lambda: (
            isinstance(script.now, Flaky) and script.now.attempts and not scaled.throttler.in_flight
        )
    )

    assert (await edge.call(json={"x": 2})).json() == {"x": 2}
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_the_ladder_is_climbed_after_the_last_retry(edge: Edge, script: Script) -> None:
    await warmed(edge, fallback=(Fallback(kind="static", body="sorry"),))
    script.now = crashing = Crashing(edge)
    answer = await edge.call(json={"x": 1})

    assert (answer.json(), answer.headers["pilotlight-degraded"]) == ("sorry", "static")
    assert len(crashing.kills) == 4


class TestBreaker:
    """A revision that fails, through the edge."""

    @pytest.fixture(name="settings")
    def _settings(self) -> ActivatorSettings:
        return ActivatorSettings(max_body_bytes=1000)

    async def test_calls_are_kept_from_a_revision_that_crashes(
        self, edge: Edge, script: Script
    ) -> None:
        edge.breaker = BreakerTerms(open_s=60)  # longer than this takes
        await warmed(edge, None)
        script.now = Crashing(edge)
        statuses = [(await edge.call(json={"x": 1})).status_code for _ in range(20)]
        refused = await edge.call(json={"x": 1})
        problem = problem_of(refused)

        assert set(statuses) == {502}
        assert (refused.status_code, str(problem["type"]).rpartition("/")[2]) == (
            503,
            "circuit-open",
        )
        assert int(refused.headers["retry-after"]) >= 30
        assert edge.scaler.states()[TENANT, "shop", "hello", "circuit_open"] == 1
        started = len(edge.fleet.started)
        assert (await edge.call(json={"x": 1})).status_code == 503
        assert len(edge.fleet.started) == started, "nothing is started for what would fail"

    async def test_an_open_breaker_is_what_a_fallback_is_for(
        self, edge: Edge, script: Script
    ) -> None:
        await warmed(edge, None, fallback=(Fallback(kind="static", body="sorry"),))
        script.now = Crashing(edge)
        answers = [await edge.call(json={"x": 1}) for _ in range(25)]

        assert {(a.status_code, a.headers["pilotlight-degraded"]) for a in answers} == {
            (200, "static")
        }
        assert len(edge.fleet.started) <= 21

    async def test_what_user_code_raises_opens_no_breaker(self, edge: Edge, script: Script) -> None:
        await warmed(edge, None)
        script.now = Flaky(30)
        for _ in range(30):
            assert (await edge.call(json={"x": 1})).status_code == 500

        assert (await edge.call(json={"x": 1})).status_code == 200

    async def test_callers_of_short_patience_open_no_breaker(
        self, edge: Edge, script: Script
    ) -> None:
        await warmed(edge, None)
        script.now = forever
        for _ in range(22):
            answer = await edge.call(json={"x": 1}, headers={"pilotlight-timeout": "0.02"})
            assert answer.status_code == 504
        script.now = echo

        assert (await edge.call(json={"x": 1})).status_code == 200


class SlowGate:
    """Quotas that are counted elsewhere: an answer never comes (`quotas.store.Gate`)."""

    is_immediate = False

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()

    def head(self) -> bytes:
        """See Gate."""
        return b""

    def try_acquire_nowait(self, requests: int, calls: int, tokens: int) -> None:
        """See Gate."""
        raise AssertionError("never asked")

    async def try_acquire(self, requests: int, calls: int, tokens: int) -> None:
        """See Gate."""
        self.is_asked.set()
        await asyncio.Event().wait()

    def settle(self, reserved: int, used: int) -> None:
        """See Gate."""

    def charge(self, requests: int) -> None:
        """See Gate."""

    def release(self) -> None:
        """See Gate."""

    def refund(self, requests: int, calls: int, tokens: int) -> None:
        """See Gate."""


class Raised(FallbackResponse):
    """User code raised in it."""

    __slots__ = ("closed",)

    def __init__(self, call: Call) -> None:
        super().__init__(
            call, WorkerResponse(None, 500, [(b"pilotlight-outcome", b"raised")], b"{}")
        )
        self.closed: list[tuple[int, str]] = []

    def close(self, *, status: int, outcome: str, bytes_out: int, finish: str = "") -> str:
        """See Exchange."""
        self.closed.append((status, outcome))
        return "0"


async def test_a_caller_that_leaves_while_a_retry_is_asked_for_leaves_no_slot_taken() -> None:
    gate = SlowGate()
    call = call_of(target_of(spec_of(retries=AT_ONCE)), b"", admission=Admission(gate))
    exchange = Raised(call)

    async def first() -> Raised:
        return exchange

    async def again(_: Call) -> Raised:
        raise AssertionError("not begun again")

    task = asyncio.create_task(RetryExecutor(RetryBudgets(0.2)).run(call, first(), again))
    await gate.is_asked.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert exchange.closed == [(500, "error")], "it was answered: its record says so"
