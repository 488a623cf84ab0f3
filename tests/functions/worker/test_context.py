"""`pilotlight.context()` inside real workers: in every style of function and thread, and nowhere
else."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

import pilotlight
from pilotlight.current_call.context import CURRENT_CALL
from pilotlight.errors import InvalidInput
from pilotlight.protocol import HEADER_ARM, HEADER_ATTEMPT, HEADER_CALL, HEADER_DEADLINE
from pilotlight.spec.function import FunctionKind, MethodSpec
from pilotlight.worker.user_code.current_call import FunctionIdentity, RunningCall
from pilotlight.worker.user_code.spans import CallSpans
from tests.fakes.fake_shim import FakeInstance, FakeShim, function_spec
from tests.fakes.plain_http import NO_TLS

CALL = "req-0123456789abcdef0123456789abcdef"
CODE = """
import asyncio, contextvars, threading
import pilotlight

def told():
    c = pilotlight.context()
    return {
        "call": c.call_id, "attempt": c.attempt, "arm": c.arm, "revision": c.revision, "function": c.function,
        "traceparent": c.traceparent, "deadline": c.deadline and c.deadline.isoformat(), "remaining_s": min(c.remaining_s(), 1e9),
    }

class Service:
    def synchronous(self): return told()

    async def asynchronous(self):
        await asyncio.sleep(0)
        return await asyncio.create_task(self.in_task())

    async def in_task(self): return told()

    async def to_thread(self): return await asyncio.to_thread(told)

    def generator(self):
        yield told()
        yield told()

    async def async_generator(self):
        yield told()

    def carried(self):
        found = []
        thread = threading.Thread(target=contextvars.copy_context().run, args=(lambda: found.append(told()),))
        thread.start()
        thread.join()
        return found[0]

    def bare(self):
        found = []
        def look():
            try:
                told()
            except pilotlight.InvalidInput as e:
                found.append(str(e))
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return found[0]

    def steady(self):
        first, second = pilotlight.context(), pilotlight.context()
        return [first is second, first.deadline == second.deadline, first.remaining_s() >= second.remaining_s()]

    @pilotlight.method(example=[])
    def warmed(self): return pilotlight.context().attempt
"""
METHODS = [
    "synchronous",
    "asynchronous",
    "to_thread",
    "generator",
    "async_generator",
    "carried",
    "bare",
    "steady",
]


@pytest.fixture(scope="module", name="instance")
def _instance() -> Iterator[FakeInstance]:
    methods = [MethodSpec(name=name) for name in METHODS] + [MethodSpec(name="warmed", example=[])]
    with FakeShim(
        {"app.py": CODE},
        function_spec(qualname="Service", kind=FunctionKind.CLASS, methods=methods, max_inputs=4),
    ) as shim:
        yield shim.start()


async def ask(instance: FakeInstance, method: str, **headers: str) -> Any:
    transport = httpx.AsyncHTTPTransport(uds=instance.path, verify=NO_TLS)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://worker", timeout=30
    ) as client:
        answer = await client.post(
            f"/invoke/{method}", json=[], headers={HEADER_CALL: CALL, **headers}
        )
    assert answer.status_code == 200, answer.text
    is_lines = answer.headers["content-type"].startswith("application/x-ndjson")
    return (
        [httpx.Response(200, content=line).json() for line in answer.content.splitlines()]
        if is_lines
        else answer.json()
    )


@pytest.mark.parametrize(
    "method",
    ["synchronous", "asynchronous", "to_thread", "generator", "async_generator", "carried"],
)
async def test_a_call_knows_itself_in_every_style(instance: FakeInstance, method: str) -> None:
    before = datetime.now(UTC)
    answer = await ask(
        instance, method, **{HEADER_DEADLINE: "30", HEADER_ATTEMPT: "3", HEADER_ARM: "small"}
    )
    for told in answer if isinstance(answer, list) else [answer]:
        assert (told["call"], told["attempt"], told["arm"]) == (CALL, 3, "small")
        assert 0 < told["remaining_s"] <= 30
        assert (
            before
            < datetime.fromisoformat(told["deadline"])
            <= datetime.now(UTC) + timedelta(seconds=30)
        )
        assert told["function"]
        assert told["revision"]


async def test_the_first_attempt_without_a_clock_in_no_experiment(instance: FakeInstance) -> None:
    told = await ask(instance, "synchronous")

    assert (told["attempt"], told["arm"], told["deadline"], told["remaining_s"]) == (
        1,
        "",
        None,
        1e9,
    )


async def test_its_trace_goes_on_below_the_span_that_the_activator_named(
    instance: FakeInstance,
) -> None:
    given = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

    assert (await ask(instance, "synchronous", traceparent=given))["traceparent"] == given
    assert (await ask(instance, "synchronous"))["traceparent"].startswith("00-")


async def test_it_is_the_same_each_time_and_its_time_runs(instance: FakeInstance) -> None:
    assert await ask(instance, "steady", **{HEADER_DEADLINE: "30"}) == [True, True, True]


async def test_a_thread_of_ones_own_is_told_what_to_do(instance: FakeInstance) -> None:
    assert "contextvars.copy_context().run" in await ask(instance, "bare")


async def test_an_example_of_a_warm_up_has_a_context_too(instance: FakeInstance) -> None:
    """The fixture would not have come up without one."""
    assert await ask(instance, "warmed") == 1


def test_outside_of_calls_there_is_none() -> None:
    with pytest.raises(InvalidInput, match="outside a call of a deployed function"):
        pilotlight.context()


def test_odd_headers_are_no_reason_to_fail() -> None:
    headers = {b"pilotlight-deadline-s": b"soon", b"pilotlight-attempt": b"-1"}
    found = RunningCall(headers, CallSpans("req-1")).context()

    assert (found.attempt, found.deadline, found.remaining_s()) == (1, None, float("inf"))


def test_a_revision_is_named_as_its_callers_see_it() -> None:
    before = FunctionIdentity.function, FunctionIdentity.revision
    try:
        FunctionIdentity.set(function="embed", key="f-1@v7-3f2a91")
        token = CURRENT_CALL.set(RunningCall({}, CallSpans("req-1")))
        assert (pilotlight.context().function, pilotlight.context().revision) == (
            "embed",
            "v7-3f2a91",
        )
        CURRENT_CALL.reset(token)
    finally:
        FunctionIdentity.function, FunctionIdentity.revision = before
