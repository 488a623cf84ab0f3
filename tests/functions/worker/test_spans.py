"""`pilotlight.span` inside real workers: what is recorded where, and what of it is told."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import contextvars
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

import pilotlight
from pilotlight.core.tracing.trace_context import attempt_span_id, child_span_id
from pilotlight.current_call.spans import CURRENT_RECORDER
from pilotlight.protocol import HEADER_ATTEMPT, HEADER_CALL, HEADER_FINISH, HEADER_SPANS
from pilotlight.spec.function import FunctionKind, MethodSpec
from pilotlight.spec.policies import Objectives
from pilotlight.worker.user_code.spans import MAX_BYTES, MAX_SPANS, CallSpans
from tests.fakes.fake_shim import FakeInstance, FakeShim, function_spec
from tests.fakes.plain_http import NO_TLS

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
CALL = "req-0123456789abcdef0123456789abcdef"
CODE = """
import asyncio, contextvars, threading
import pilotlight

@pilotlight.span("decorated", by="decorator")
def decorated(): ...

class Service:
    async def asynchronous(self):
        async with pilotlight.span("outer", tokens=12) as outer:
            await asyncio.gather(self.inner("a"), self.inner("b"))
            outer.set(done=True)

    async def inner(self, name):
        with pilotlight.span(name):
            await asyncio.sleep(0)

    def synchronous(self):
        with pilotlight.span("outer"):
            with pilotlight.span("inner"):
                decorated()
        with pilotlight.span("after"):
            ...

    async def in_threads(self):
        with pilotlight.span("outer"):
            await asyncio.to_thread(self.synchronous)
            carried = threading.Thread(target=contextvars.copy_context().run, args=(decorated,))
            bare = threading.Thread(target=decorated)
            for thread in (carried, bare):
                thread.start()
                thread.join()

    def generator(self):
        with pilotlight.span("outer"):
            for n in range(2):
                with pilotlight.span(f"item {n}"):
                    yield n

    async def async_generator(self):
        async with pilotlight.span("outer"):
            for n in range(2):
                with pilotlight.span(f"item {n}"):
                    yield n

    def raising(self):
        with pilotlight.span("careful"):
            raise KeyError("no")

    def many(self, n: int, size: int):
        for i in range(n):
            with pilotlight.span(f"s{i}", text="x" * size):
                ...

    def quiet(self):
        ...

    def slow(self):
        import time
        with pilotlight.span("lazy"):
            time.sleep(0.02)

    def odd(self):
        class Odd:
            def __str__(self):
                raise ValueError
        with pilotlight.span("odd", name="n", kind=1, big=2**70, nan=float("nan"), odd=Odd(), many=[1, 2], none=None, text="\\ud800"):
            ...

    def with_opentelemetry(self):
        from opentelemetry import trace
        def current():
            found = trace.get_current_span().get_span_context()
            return [f"{found.trace_id:032x}", f"{found.span_id:016x}", found.is_remote, bool(found.trace_flags.sampled)]
        around = current()
        with pilotlight.span("mine") as mine:
            inside = [current(), mine.id]
        return [around, inside, current()]
"""
METHODS = [
    "asynchronous",
    "synchronous",
    "in_threads",
    "generator",
    "async_generator",
    "raising",
    "many",
    "quiet",
    "slow",
    "odd",
    "with_opentelemetry",
]


@contextlib.contextmanager
def serving(*, slow_s: float) -> Iterator[FakeInstance]:
    """An instance whose calls are slow when they take longer than that."""
    spec = function_spec(
        qualname="Service",
        kind=FunctionKind.CLASS,
        methods=[MethodSpec(name=m) for m in METHODS],
        max_inputs=4,
    )
    with FakeShim(
        {"app.py": CODE}, replace(spec, objectives=Objectives(warm_latency_s=slow_s))
    ) as shim:
        yield shim.start()


@pytest.fixture(scope="module")
def instance() -> Iterator[FakeInstance]:
    with serving(slow_s=60.0) as made:
        yield made


def decoded(value: str) -> dict[str, Any]:
    return dict(json.loads(base64.b64decode(value, validate=True)))


async def told(
    instance: FakeInstance, method: str, *args: Any, headers: dict[str, str] = SAMPLED
) -> dict[str, Any] | None:
    transport = httpx.AsyncHTTPTransport(uds=instance.path, verify=NO_TLS)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://worker", timeout=30
    ) as client:
        answer = await client.post(
            f"/invoke/{method}", json=list(args), headers={HEADER_CALL: CALL, **headers}
        )
    value = answer.headers.get(HEADER_SPANS)
    return None if value is None else decoded(value)


def tree(body: dict[str, Any] | None) -> list[tuple[str, str]]:
    """(name, its parent's name), as they began."""
    assert body is not None
    names = {row[0]: row[2] for row in body["spans"]}
    return [(row[2], names.get(row[1], "")) for row in body["spans"]]


async def streamed(instance: FakeInstance, method: str) -> dict[str, Any]:
    """What stands behind the last chunk; httpx does not tell trailers."""
    reader, writer = await asyncio.open_unix_connection(instance.path)
    head = (
        f"POST /invoke/{method} HTTP/1.1\r\nhost: w\r\n{HEADER_CALL}: {CALL}\r\ntraceparent: "
        f"{SAMPLED['traceparent']}\r\n"
    )
    writer.write((head + "content-type: application/json\r\ncontent-length: 2\r\n\r\n[]").encode())
    await reader.readuntil(b"\r\n\r\n")
    tail = (await reader.readuntil(b"\r\n\r\n")).decode()
    writer.write(b"GET /health HTTP/1.1\r\nhost: w\r\n\r\n")
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")  # the connection serves on
    writer.close()
    lines = dict(line.split(": ", 1) for line in tail.rpartition("0\r\n")[2].split("\r\n") if line)
    assert lines[HEADER_FINISH] == "stop"
    return decoded(lines[HEADER_SPANS])


# -- where spans hang ------------------------------------------------------------------------------
async def test_spans_of_tasks_hang_below_the_one_around_them(instance: FakeInstance) -> None:
    body = await told(instance, "asynchronous")
    assert body is not None
    assert sorted(tree(body)) == [("a", "outer"), ("b", "outer"), ("outer", "")]
    (outer,) = [row for row in body["spans"] if row[2] == "outer"]
    assert outer[6] == {"tokens": 12, "done": True}
    assert 0 <= outer[3] <= outer[3] + outer[4] <= body["ms"]


async def test_synchronous_code_nests_too_and_decorators_are_spans(instance: FakeInstance) -> None:
    assert tree(await told(instance, "synchronous")) == [
        ("outer", ""),
        ("inner", "outer"),
        ("decorated", "inner"),
        ("after", ""),
    ]


async def test_a_thread_has_the_context_it_was_given_or_none(instance: FakeInstance) -> None:
    found = tree(await told(instance, "in_threads"))
    assert ("inner", "outer") in found
    # the thread that carries a context; the bare one recorded nothing
    assert found.count(("decorated", "outer")) == 1
    assert len(found) == 6


@pytest.mark.parametrize("method", ["generator", "async_generator"])
async def test_a_generators_spans_come_behind_its_last_item(
    instance: FakeInstance, method: str
) -> None:
    assert tree(await streamed(instance, method)) == [
        ("outer", ""),
        ("item 0", "outer"),
        ("item 1", "outer"),
    ]


async def test_ids_count_up_from_the_span_of_the_caller(instance: FakeInstance) -> None:
    body = await told(instance, "synchronous")
    assert body is not None
    assert [row[0] for row in body["spans"]] == [child_span_id(SPAN, n) for n in range(1, 5)]


# -- what is told ----------------------------------------------------------------------------------
async def test_a_call_that_nobody_keeps_tells_nothing(instance: FakeInstance) -> None:
    assert await told(instance, "synchronous", headers={}) is None
    assert (
        await told(
            instance, "synchronous", headers={"traceparent": SAMPLED["traceparent"][:-1] + "0"}
        )
        is None
    )
    assert await told(instance, "synchronous", headers={"traceparent": "nonsense"}) is None


async def test_a_call_that_failed_tells_without_being_asked(instance: FakeInstance) -> None:
    body = await told(instance, "raising", headers={})
    assert body is not None
    (row,) = body["spans"]
    assert (row[0], row[2], row[5]) == (
        child_span_id(attempt_span_id(CALL), 1),
        "careful",
        "KeyError",
    )


async def test_a_slow_call_tells_without_being_asked() -> None:
    with serving(slow_s=0.01) as hasty:
        assert tree(await told(hasty, "slow", headers={})) == [("lazy", "")]


async def test_a_call_without_spans_tells_its_time(instance: FakeInstance) -> None:
    body = await told(instance, "quiet")
    assert body is not None
    assert (body["spans"], body["dropped"]) == ([], 0)
    assert body["ms"] > 0


async def test_too_many_spans_and_too_many_bytes_are_dropped_and_counted(
    instance: FakeInstance,
) -> None:
    many = await told(instance, "many", MAX_SPANS + 36, 1)
    assert many is not None
    assert (len(many["spans"]) + many["dropped"], many["spans"][0][2]) == (MAX_SPANS + 36, "s0")
    large = await told(instance, "many", MAX_SPANS, 10_000)
    assert large is not None
    assert len(base64.b64encode(json.dumps(large, separators=(",", ":")).encode())) <= MAX_BYTES
    assert len(large["spans"]) + large["dropped"] == MAX_SPANS


async def test_attributes_are_texts_numbers_and_booleans_whatever_was_given(
    instance: FakeInstance,
) -> None:
    body = await told(instance, "odd")
    assert body is not None
    (row,) = body["spans"]
    assert row[6] == {
        "name": "n",
        "kind": 1,
        "big": str(2**70),
        "nan": "nan",
        "odd": "Odd",
        "many": "[1, 2]",
        "none": "None",
        "text": "?",
    }


async def test_opentelemetry_in_user_code_sees_our_spans_as_the_current_ones(
    instance: FakeInstance,
) -> None:
    async def currents(headers: dict[str, str]) -> Any:
        transport = httpx.AsyncHTTPTransport(uds=instance.path, verify=NO_TLS)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://worker", timeout=30
        ) as client:
            return (
                await client.post(
                    "/invoke/with_opentelemetry", json=[], headers={HEADER_CALL: CALL, **headers}
                )
            ).json()

    await currents({})  # its import is what makes it known
    around, (inside, mine), after = await currents(SAMPLED)
    assert around == after == [TRACE, SPAN, True, True]
    assert inside == [TRACE, mine, True, True]
    (trace_id, span_id, _, is_sampled), *_ = await currents({HEADER_ATTEMPT: "2"})
    assert (trace_id, span_id, is_sampled) == (CALL[4:], attempt_span_id(CALL, 2), False)


# -- outside ---------------------------------------------------------------------------------------
def test_outside_a_call_a_span_does_nothing() -> None:
    with pilotlight.span("nothing", a=1) as one, pilotlight.span("inside"):
        assert (one.id, CURRENT_RECORDER.get()) == ("", None)

    @pilotlight.span("call")
    def double(x: int) -> int:
        return 2 * x

    assert double(2) == 4


def test_a_generator_is_no_function_to_decorate() -> None:
    with pytest.raises(TypeError, match="is a generator"):

        @pilotlight.span("stream")
        def items() -> Iterator[int]:
            yield 1


def test_spans_that_end_out_of_order_leave_the_outer_one_current() -> None:
    def act() -> None:
        spans = CallSpans(CALL, SAMPLED["traceparent"].encode())
        CURRENT_RECORDER.set(spans)
        first, second = pilotlight.span("first"), pilotlight.span("second")
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert CURRENT_RECORDER.get() is second
        second.__exit__(None, None, None)
        assert CURRENT_RECORDER.get() is spans

    contextvars.copy_context().run(act)


def test_a_span_that_ends_in_another_thread_leaves_its_context_alone() -> None:
    def act() -> None:
        CURRENT_RECORDER.set(CallSpans(CALL))
        one = pilotlight.span("one")
        one.__enter__()
        thread = threading.Thread(target=one.__exit__, args=(None, None, None))
        thread.start()
        thread.join()
        assert CURRENT_RECORDER.get() is one
        with pilotlight.span("two") as two:
            assert two.parent == one.id

    contextvars.copy_context().run(act)
