"""Warm calls, which run without a task, through real HTTP: what they do by themselves, and how they
go on when they stop being simple."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest

from activator.gateway.fast_path import CLOCK_STEP_S, CallIds, DeadlineWheel, HasDeadline
from activator.lifecycle import KEEP_ALIVE_S
from pilotlight.protocol import new_call_id
from pilotlight.spec.function import Clocks as ClockSpec
from pilotlight.spec.function import MethodSpec
from tests.activator.conftest import KEY, Edge
from tests.activator.test_gateway import forever, problem_of, until
from tests.fakes.fake_worker import Script, WorkerAnswer, WorkerRequest, echo
from tests.fakes.routes import route_of, spec_of


@pytest.fixture(name="warm_edge")
async def _warm_edge(edge: Edge) -> Edge:
    edge.add(route_of(spec_of()))
    await edge.call(json={"x": 0})
    return edge


def post(body: bytes, *, path: str = "/v1/functions/shop/hello:invoke", more: str = "") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer "
        f"{KEY}\r\n{more}content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Raw:
    """A client that speaks bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def answer(self) -> tuple[bytes, bytes]:
        """Head and body of the next answer."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return head, await self.reader.readexactly(length)


@pytest.fixture(name="raw")
async def _raw(warm_edge: Edge) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", int(warm_edge.url.rpartition(":")[2])
    )
    yield Raw(reader, writer)
    writer.close()


def begun(edge: Edge, count: int) -> Callable[[], bool]:
    return lambda: sum(len(worker.requests) for worker in edge.fleet.workers.values()) >= count


def in_flight(edge: Edge) -> int:
    return sum(scaled.throttler.in_flight for scaled in edge.scaler.revisions.values())


async def test_a_warm_call_makes_no_task(warm_edge: Edge, script: Script) -> None:
    script.now = forever
    task = asyncio.create_task(warm_edge.call(json={"x": 1}))
    await until(begun(warm_edge, 2))

    names = [t.get_coro().__qualname__ for t in asyncio.all_tasks()]  # type: ignore[union-attr]
    assert not any("run_asgi" in name for name in names)
    assert in_flight(warm_edge) == 1
    task.cancel()
    await until(lambda: in_flight(warm_edge) == 0)


async def test_warm_and_other_answers_carry_the_same_headers(warm_edge: Edge) -> None:
    slow = await warm_edge.call(json={"x": 1}, headers={"pilotlight-timeout": "9"})
    warm = await warm_edge.call(json={"x": 1})

    assert list(warm.headers) == list(slow.headers)
    assert (warm.status_code, warm.content, warm.headers["pilotlight-start"]) == (
        200,
        slow.content,
        "WARM",
    )


async def test_pipelined_requests_are_answered_in_order_whatever_way_they_go(raw: Raw) -> None:
    health = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
    raw.writer.write(post(b'{"x":1}') + post(b'{"x":2}') + health + post(b'{"x":3}'))

    bodies = [(await raw.answer())[1] for _ in range(4)]

    assert [bodies[0], bodies[1], bodies[3]] == [b'{"x":1}', b'{"x":2}', b'{"x":3}']
    assert b"routes" in bodies[2]


async def test_a_body_that_comes_after_its_head_is_waited_for(raw: Raw, warm_edge: Edge) -> None:
    request = post(b'{"x":12345}')
    raw.writer.write(request[:-6])
    await raw.writer.drain()
    await asyncio.sleep(0.01)
    raw.writer.write(request[-6:])

    assert (await raw.answer())[1] == b'{"x":12345}'


async def test_bad_arguments_are_refused_on_a_warm_path_too(warm_edge: Edge) -> None:
    answer = await warm_edge.call(json={"x": "one"})

    assert (answer.status_code, problem_of(answer)["parameter"]) == (400, "x")
    assert len(await warm_edge.settle()) == 1


async def test_a_caller_that_wants_its_connection_closed_gets_that(raw: Raw) -> None:
    raw.writer.write(post(b'{"x":1}', more="connection: close\r\n"))
    head, body = await raw.answer()

    assert (body, b"connection: close" in head, await raw.reader.read()) == (b'{"x":1}', True, b"")


async def test_an_older_version_of_http_is_answered_in_its_own_way(raw: Raw) -> None:
    raw.writer.write(
        post(b'{"x":1}', more="connection: keep-alive\r\n").replace(b"HTTP/1.1", b"HTTP/1.0")
    )
    head, body = await raw.answer()

    assert (body, b"connection: close" in head, await raw.reader.read()) == (b'{"x":1}', True, b"")


async def test_a_call_that_finds_no_free_connection_counts_once(warm_edge: Edge) -> None:
    budgets = warm_edge.gateway.warm.runner.retries.budgets
    before = budgets.for_caller(f"k-{KEY}", time.monotonic()).calls
    for scaled in warm_edge.scaler.revisions.values():
        for instance in scaled.throttler.instances.values():
            instance.connections.close()
    answer = await warm_edge.call(json={"x": 1})

    calls = budgets.for_caller(f"k-{KEY}", time.monotonic()).calls
    assert (answer.status_code, calls - before) == (200, 1)


async def test_a_caller_that_leaves_ends_its_call_and_its_bill(
    raw: Raw, warm_edge: Edge, script: Script
) -> None:
    script.now = forever
    raw.writer.write(post(b'{"x":1}'))
    await until(begun(warm_edge, 2))
    (worker,) = warm_edge.fleet.workers.values()
    raw.writer.close()
    await until(lambda: worker.cancelled == 1)
    outcomes = sorted(
        (record.status, record.outcome) for record in (await warm_edge.settle()).values()
    )

    assert outcomes == [(200, "ok"), (499, "cancelled")]
    assert in_flight(warm_edge) == 0


async def test_an_instance_that_dies_under_a_warm_call_is_a_502_with_the_reason(
    warm_edge: Edge, script: Script
) -> None:
    script.now = forever
    task = asyncio.create_task(warm_edge.call(json={"x": 1}))
    await until(begun(warm_edge, 2))
    await warm_edge.fleet.kill(warm_edge.fleet.started[0], "out_of_memory")
    answer = await task

    assert (answer.status_code, problem_of(answer)["reason"]) == (502, "out_of_memory")
    assert sorted(r.status for r in (await warm_edge.settle()).values()) == [200, 502]


async def test_an_idempotent_warm_call_is_tried_once_more_elsewhere(
    edge: Edge, script: Script
) -> None:
    edge.add(route_of(spec_of(idempotent=True)))
    await edge.call(json={"x": 0})
    script.now = forever
    task = asyncio.create_task(edge.call(json={"x": 1}))
    await until(begun(edge, 2))
    script.now = echo
    await edge.fleet.kill(edge.fleet.started[0], "killed")
    answer = await task

    assert (answer.status_code, answer.json()) == (200, {"x": 1})
    assert f"{answer.headers['x-request-id']}/2" in await edge.settle()


@pytest.mark.parametrize("headers", [{}, {"pilotlight-timeout": "30"}], ids=["warm", "in a task"])
async def test_a_worker_that_is_busy_is_asked_again(
    warm_edge: Edge, script: Script, headers: dict[str, str]
) -> None:
    async def busy_once(request: WorkerRequest) -> WorkerAnswer:
        script.now = echo
        return WorkerAnswer(status=503, outcome="busy", body=b"{}")

    script.now = busy_once
    answer = await warm_edge.call(json={"x": 1}, headers=headers)

    assert (answer.status_code, answer.json()) == (200, {"x": 1})
    assert sorted(record.outcome for record in (await warm_edge.settle()).values()) == [
        "busy",
        "ok",
        "ok",
    ]


async def test_an_answer_that_streams_goes_on_in_a_task(edge: Edge, script: Script) -> None:
    async def items() -> AsyncIterator[bytes]:
        for n in range(3):
            yield b"data: %d\n\n" % n

    async def stream(request: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(chunks=items(), content_type=request.headers["accept"])

    edge.add(route_of(spec_of(methods=(MethodSpec(is_generator=True),))))
    script.now = stream
    texts = [
        (await edge.call(json={}, headers={"accept": "text/event-stream"})).text for _ in range(2)
    ]

    assert [text.split("event: end")[0] for text in texts] == [
        "data: 0\n\ndata: 1\n\ndata: 2\n\n"
    ] * 2
    assert [record.outcome for record in (await edge.settle()).values()] == ["ok", "ok"]


class ClocksByHand(DeadlineWheel):
    """Execution clocks that run out when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self._watched: list[set[HasDeadline]] = []

    def watch(
        self, call: HasDeadline, loop: asyncio.AbstractEventLoop, seconds: float
    ) -> set[HasDeadline]:
        self._watched.append(super().watch(call, loop, seconds))
        return self._watched[-1]

    def run_out(self) -> None:
        """The clocks of all running calls run out."""
        for call in [call for calls in self._watched for call in calls]:
            call.overrun()


async def test_a_warm_call_that_never_returns_is_cut_off_by_its_clock_and_its_instance_replaced(
    edge: Edge, script: Script
) -> None:
    clocks = edge.gateway.warm.clocks = ClocksByHand()
    edge.add(route_of(spec_of(clocks=ClockSpec(execution_s=1.0))))
    await edge.call(json={"x": 0})
    script.now = forever
    task = asyncio.create_task(edge.call(json={"x": 1}))
    await until(begun(edge, 2))
    clocks.run_out()
    answer = await task
    await until(lambda: edge.fleet.stopped)

    assert (answer.status_code, problem_of(answer)["clock"]) == (504, "execution")
    assert sorted(record.status for record in (await edge.settle()).values()) == [200, 504]


class Overdue:
    """Notes that its clock ran out (`warm.Timed`)."""

    def __init__(self) -> None:
        self.rang = asyncio.Event()

    def overrun(self) -> None:
        self.rang.set()


async def test_a_clock_rings_within_a_step_of_its_time_unless_its_call_left() -> None:
    loop = asyncio.get_running_loop()
    clocks, late, left = DeadlineWheel(), Overdue(), Overdue()
    began, rang = loop.time(), list[bool]()
    loop.call_at(began + 0.01, lambda: rang.append(late.rang.is_set()))
    clocks.watch(late, loop, 0.01)
    clocks.watch(left, loop, 0.01).discard(left)
    # timers go off in their order, however late
    loop.call_later(0.01 + 2 * CLOCK_STEP_S, lambda: rang.append(late.rang.is_set()))
    while len(rang) < 2:
        await asyncio.sleep(0.001)

    assert rang == [False, True]
    assert not left.rang.is_set()
    assert repr(clocks) == "<DeadlineWheel 0 calls in 0 steps>"


async def test_connections_that_stay_idle_are_closed_by_the_sweep(
    raw: Raw, warm_edge: Edge
) -> None:
    raw.writer.write(post(b'{"x":1}'))
    await raw.answer()
    now = asyncio.get_running_loop().time()

    assert warm_edge.limits.close_idle(now + KEEP_ALIVE_S - 60) == 0
    assert warm_edge.limits.close_idle(now + KEEP_ALIVE_S + 1) >= 1
    assert await raw.reader.read() == b""


@pytest.mark.parametrize("headers", [{}, {"pilotlight-timeout": "30"}], ids=["warm", "in a task"])
async def test_a_record_that_cannot_be_closed_costs_no_slot(
    warm_edge: Edge, script: Script, headers: dict[str, str]
) -> None:
    async def close_it_first(request: WorkerRequest) -> WorkerAnswer:
        script.now = echo
        (scaled,) = warm_edge.scaler.revisions.values()
        (instance,) = scaled.throttler.instances.values()
        # closing the ticket raises KeyError
        instance.account.meter.end(f"{request.headers['pilotlight-call']}/1", time.monotonic_ns())
        return WorkerAnswer(body=b"1")

    script.now = close_it_first
    broken = await warm_edge.call(json={"x": 1}, headers=headers)
    after = await warm_edge.call(json={"x": 2}, headers=headers)

    assert (broken.status_code, after.status_code) == (500, 200)
    assert in_flight(warm_edge) == 0


async def test_a_head_that_was_seen_before_gets_the_body_that_came_with_it(raw: Raw) -> None:
    bodies = [b'{"x":1}', b'{"x":2}', b'{"x":2}', b'{"x":33}', b'{"x":34}']
    answers = []
    for body in bodies:
        raw.writer.write(post(body))
        answers.append(await raw.answer())

    assert [body for _, body in answers] == bodies
    ids = {head.lower().split(b"x-request-id: ")[1][:36] for head, _ in answers}
    assert len(ids) == len(bodies)


async def test_a_known_head_waits_for_the_rest_of_its_body(raw: Raw) -> None:
    for _ in range(2):
        raw.writer.write(post(b'{"x":12345}'))
        assert (await raw.answer())[1] == b'{"x":12345}'
    raw.writer.write(post(b'{"x":54321}')[:-6])
    await raw.writer.drain()
    await asyncio.sleep(0.01)
    raw.writer.write(b"54321}" + post(b'{"x":6}'))

    assert [(await raw.answer())[1] for _ in range(2)] == [b'{"x":54321}', b'{"x":6}']


async def test_the_end_of_a_head_is_no_head(raw: Raw) -> None:
    whole = post(b'{"x":1}')
    end = whole[whole.index(b"authorization") :]
    raw.writer.write(whole[: -len(end)])
    await raw.writer.drain()
    await asyncio.sleep(0.01)
    raw.writer.write(end)
    assert (await raw.answer())[1] == b'{"x":1}'
    raw.writer.write(end)

    assert (await raw.answer())[0].startswith(b"HTTP/1.1 400 ")


async def test_a_known_head_is_not_let_in_once_its_key_is_revoked(
    raw: Raw, warm_edge: Edge
) -> None:
    for _ in range(2):
        raw.writer.write(post(b'{"x":1}'))
        assert (await raw.answer())[0].startswith(b"HTTP/1.1 200 ")
    warm_edge.tell("key", f"k-{KEY}", None)
    raw.writer.write(post(b'{"x":1}'))

    assert (await raw.answer())[0].startswith(b"HTTP/1.1 401 ")


async def test_a_call_with_a_known_head_waits_for_a_slot_like_any_other(
    raw: Raw, warm_edge: Edge, script: Script
) -> None:
    raw.writer.write(post(b'{"x":1}'))
    await raw.answer()
    script.now = forever
    task = asyncio.create_task(warm_edge.call(json={"x": 1}))
    await until(begun(warm_edge, 3))
    script.now = echo
    raw.writer.write(post(b'{"x":2}'))

    assert (await raw.answer())[1] == b'{"x":2}'
    task.cancel()
    await until(lambda: in_flight(warm_edge) == 0)


def test_ids_of_warm_calls_are_unlike_each_other_and_sort_by_time() -> None:
    ids, before = CallIds(), new_call_id()
    made = [ids.new() for _ in range(1000)]

    assert len({name[16:] for name in made}) == len(made)
    times = [name[:16] for name in (before, *made, new_call_id())]
    assert times == sorted(times)
    assert {len(name) for name in made} == {len(before)}
