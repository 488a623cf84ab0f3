"""How attempts end, whichever entrance they came by: one table of endings, with the status for the
caller, the usage record, the metric, the trace, the slot, the worker's connection and the instance,
each exactly once."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection

from activator.balancing.instance import Instance
from activator.balancing.throttler import Throttler
from activator.billing.errors import JournalFull
from activator.calls.trace_context import ASKED, Trace
from activator.gateway.http_proxy import MAX_RESENT_BYTES
from activator.gateway.shadow_traffic import ShadowBudget, ShadowTraffic
from pilotlight.controller.scheduling.dispatch_queue import payload
from pilotlight.protocol import CallRecord, FunctionRoute
from pilotlight.spec.function import Clocks, FunctionKind, FunctionSpec, MethodSpec
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.observations import SHADOW_ARM
from pilotlight.spec.policies import Fallback
from pilotlight.spec.traffic import Shadow
from snapshotter.errors import StartFailed
from tests.activator.conftest import KEY, Edge
from tests.activator.gateway.test_http_proxy import chatting
from tests.activator.llm.openai.conftest import llm
from tests.activator.test_gateway import forever, until
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.routes import SCHEMA, TENANT, route_of, spec_of, split_route

HEADERS = {"authorization": f"Bearer {KEY}"}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SAMPLED = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
EXECUTION_S = 1.0
ONE = Scaling(max_instances=1)
COUNTED = ("answered", "failed", "refused", "cancelled", "skipped")


class Worker:
    """A worker that behaves as `next` says, once, and otherwise answers with `body`."""

    def __init__(self) -> None:
        self.next: Callable[[WorkerRequest], Awaitable[WorkerAnswer]] | None = None
        self.has_begun = asyncio.Event()
        self.body = b'{"x":1}'
        self.of_copies = False
        """Whether `next` is for copies of calls."""

    async def __call__(self, request: WorkerRequest) -> WorkerAnswer:
        if self.of_copies and request.headers.get("pilotlight-arm") != SHADOW_ARM:
            return WorkerAnswer(body=self.body)
        behave, self.next = self.next, None
        self.has_begun.set()
        if behave is None:
            return WorkerAnswer(body=self.body)
        return await behave(request)


@pytest.fixture(name="behaviour")
def _behaviour() -> Worker:
    return Worker()


@dataclass(frozen=True)
class Entrance:
    """A way to call a function. `streams`: its responses stream."""

    path: str
    headers: tuple[tuple[str, str], ...] = ()
    streams: bool = False
    body: bytes = b'{"x":1}'

    is_direct = True
    """Whether its caller gets the status of the attempt."""
    function = "hello"
    """The function that its caller names."""
    runs = ("hello", "v1-abcdef")
    """The function and the revision that run the call."""

    def routes(self, clocks: Clocks) -> list[FunctionRoute]:
        """What is deployed."""
        method = MethodSpec(schema=SCHEMA, parameters=("x", "y"), is_generator=self.streams)
        return [route_of(spec_of(methods=(method,), clocks=clocks, scaling=ONE))]

    def prepare(self, edge: Edge, worker: Worker) -> None:
        """What the entrance needs of the world around it."""

    async def call(self, edge: Edge) -> httpx.Response:
        """Call it once, to the end."""
        headers = {**HEADERS, "content-type": "application/json", **dict(self.headers)}
        return await edge.client.post(f"{edge.url}{self.path}", headers=headers, content=self.body)


def site(clocks: Clocks) -> FunctionSpec:
    """A web application."""
    return spec_of(
        "site", kind=FunctionKind.ASGI, methods=(MethodSpec(),), clocks=clocks, scaling=ONE
    )


@dataclass(frozen=True)
class Raw(Entrance):
    """Raw HTTP to a web application."""

    function, runs = "site", ("site", "v1-abcdef")

    def routes(self, clocks: Clocks) -> list[FunctionRoute]:
        return [route_of(site(clocks))]


@dataclass(frozen=True)
class OpenAI(Entrance):
    """A chat with a language model."""

    function, runs = "assistant", ("assistant", "v1-abcdef")

    def routes(self, clocks: Clocks) -> list[FunctionRoute]:
        return [route_of(llm(clocks=clocks, scaling=ONE, engine={"max_num_seqs": 1}))]

    def prepare(self, edge: Edge, worker: Worker) -> None:
        edge.fleet.behaviours["assistant"] = worker
        said = {"role": "assistant", "content": "hi"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choice = {"index": 0, "message": said, "finish_reason": "stop"}
        body = {"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage}
        worker.body = json.dumps(body).encode()


@dataclass(frozen=True)
class Submitted(Entrance):
    """A submitted call, which its caller waits for, and cancels where the caller leaves."""

    async def submit(self, edge: Edge) -> str:
        """Return the location of the submitted call."""
        return str((await super().call(edge)).headers["location"])

    async def call(self, edge: Edge) -> httpx.Response:
        submitting = asyncio.create_task(self.submit(edge))
        try:
            url = f"{edge.url}{await asyncio.shield(submitting)}"
            while True:
                record = (await edge.client.get(f"{url}?wait_s=10", headers=HEADERS)).json()
                if record["status"]:
                    return httpx.Response(
                        record["status"],
                        content=base64.b64decode(CallRecord.from_json(record).result),
                    )
        except asyncio.CancelledError:
            url = f"{edge.url}{await submitting}"
            assert (await edge.client.post(f"{url}:cancel", headers=HEADERS)).is_success
            raise


@dataclass(frozen=True)
class Scheduled(Submitted):
    """A call of a schedule, which the controller hands out."""

    async def submit(self, edge: Edge) -> str:
        name = f"req-{len(edge.calls.pending)}"
        record = CallRecord(
            id=name,
            tenant=TENANT,
            environment="main",
            app="shop",
            function="hello",
            method="",
            state="QUEUED",
            sequence=1,
            submitted_at=1.0,
            expires_at=9e9,
            schedule="f-shop-hello/0",
        )
        kept = {**payload(record, body=self.body), "due": name}
        await edge.calls.store({**kept, "trace": Trace(TRACE, kept_for=ASKED).to_json()})
        edge.calls.begin_stored([name], [name])
        return f"/v1/calls/{name}"


@dataclass(frozen=True)
class Fallen(Entrance):
    """A call that the fallback of its function answers. A caller whose fallback fails gets the
    first failure, with the reason."""

    is_direct = False
    runs = ("small", "v1-abcdef")

    def routes(self, clocks: Clocks) -> list[FunctionRoute]:
        fallback = (Fallback(kind="function", function="small"),)
        return [
            route_of(spec_of(fallback=fallback)),
            route_of(spec_of("small", clocks=clocks, scaling=ONE)),
        ]

    def prepare(self, edge: Edge, worker: Worker) -> None:
        edge.fleet.broken["hello"] = StartFailed("hello cannot be imported")


V1, V2 = "v1-aaaaaa", "v2-bbbbbb"


def instances_of(edge: Edge) -> Iterator[Instance]:
    for scaled in edge.scaler.revisions.values():
        yield from scaled.throttler.instances.values()


@dataclass(frozen=True)
class Copied(Entrance):
    """The copy of a call for a shadow, once its caller has its own response."""

    is_direct = False
    runs = ("hello", V2)
    shadows: list[ShadowTraffic] = field(default_factory=list)
    budgets: list[ShadowBudget] = field(default_factory=list)

    def routes(self, clocks: Clocks) -> list[FunctionRoute]:
        shadow = Shadow(revision=V2, percent=100.0, max_compute=1.0)
        spec = spec_of(clocks=clocks, scaling=ONE)
        return [split_route(spec, {V1: 100}, named=(V2,), shadow=shadow)]

    def prepare(self, edge: Edge, worker: Worker) -> None:
        worker.of_copies = True
        self.shadows[:] = [
            ShadowTraffic(
                throttler_of=edge.scaler.throttler_of,
                observer=edge.metrics.observer,
                is_crowded=lambda: False,
                draw=lambda: 0.0,
                tracer=edge.tracer,
                make_budget=self._make_budget,
            )
        ]
        edge.copy_calls(self.shadows[0])

    def _make_budget(self) -> ShadowBudget:
        self.budgets.append(ShadowBudget())
        return self.budgets[-1]

    async def call(self, edge: Edge) -> httpx.Response:
        (shadows,) = self.shadows
        for budget in self.budgets:  # a minute of calls that were not copied
            budget.add(time.monotonic(), own=60_000.0)
        # a copy does not wait for an instance that was busy
        await until(lambda: not any(i.blocked_until > time.monotonic() for i in instances_of(edge)))
        answer = await super().call(edge)
        try:
            await until(lambda: not shadows._tasks)
        except asyncio.CancelledError:
            await shadows.aclose()
            raise
        return answer


JSON = "/v1/functions/shop/hello:invoke"
CHAT = "/v1/chat/completions"
CHATTED = {"model": "shop/assistant", "messages": [{"role": "user", "content": "hi"}]}
ENTRANCES = {
    "fast path": Entrance(JSON),
    "gateway": Entrance(JSON, (("pilotlight-timeout", "30"),)),
    "event stream": Entrance(JSON, (("accept", "text/event-stream"),), streams=True),
    "raw HTTP": Raw("/fn/shop/site/x"),
    "raw stream": Raw("/fn/shop/site/x", streams=True),
    "submitted": Submitted("/v1/functions/shop/hello:submit"),
    "submitted stream": Submitted("/v1/functions/shop/hello:submit", streams=True),
    "scheduled": Scheduled(""),
    "open inference": Entrance("/v1/models/shop/hello:predict", body=b'{"instances":[{"x":1}]}'),
    "OpenAI": OpenAI(CHAT, body=json.dumps(CHATTED).encode()),
    "OpenAI stream": OpenAI(
        CHAT, body=json.dumps({**CHATTED, "stream": True}).encode(), streams=True
    ),
    "fallback": Fallen(JSON),
    "shadow copy": Copied(JSON),
}


@dataclass
class Ended:
    """What calls have left: status and outcome of their records, what was counted, and the statuses
    of their traces."""

    records: list[tuple[int, str]]
    counted: dict[str, int]
    traced: list[int]


@dataclass
class Case:
    """One entrance of a warm function, and what happens to calls by it."""

    edge: Edge
    entrance: Entrance
    worker: Worker

    @property
    def instance(self) -> Instance:
        """The instance that runs the calls."""
        (instance,) = self.throttler.instances.values()
        return instance

    @property
    def throttler(self) -> Throttler:
        """Of the revision that runs the calls."""
        return next(
            scaled.throttler
            for scaled in self.edge.scaler.revisions.values()
            if (scaled.throttler.target.function, scaled.throttler.target.revision)
            == self.entrance.runs
        )

    async def call(self) -> httpx.Response:
        return await self.entrance.call(self.edge)

    async def warm(self) -> None:
        """Bring an instance up, and forget how."""
        self.worker.next = None
        while True:
            assert (await self.call()).status_code == 200
            await self.quiet()
            if len(self.throttler.instances) == 1:
                break
        await self.forget()

    async def forget(self) -> None:
        """Forget what calls have left so far."""
        await self.edge.settle()
        self.edge.ledger.records.clear()
        self.edge.traces.clear()
        self.edge.metrics.observer.drain(7)
        self.worker.has_begun.clear()

    async def quiet(self) -> None:
        revisions = self.edge.scaler.revisions
        await until(lambda: not any(s.throttler.in_flight for s in revisions.values()))
        await until(lambda: not any(s.throttler.starting for s in revisions.values()))

    async def ended(self) -> Ended:
        """What calls have left, once no slot is taken and no record is open."""
        await self.quiet()
        await until(lambda: self.edge.books.journal.statistics().open_calls == 0)
        is_copy = isinstance(self.entrance, Copied)
        kind = "SHADOW" if is_copy else "CALL"
        records = sorted(
            (record.status, record.outcome)
            for record in (await self.edge.settle()).values()
            if record.kind == kind
        )
        counted: dict[str, int] = {}
        for one in self.edge.metrics.observer.drain(7):
            is_of = one.function_id == f"f-shop-{self.entrance.function}"
            if is_of and is_copy == (one.arm == SHADOW_ARM):
                for name in COUNTED:
                    if getattr(one, name):
                        counted[name] = counted.get(name, 0) + getattr(one, name)
        traced = [
            trace["status"]
            for trace in self.edge.traces
            if trace["call"].endswith("-shadow") == is_copy
        ]
        return Ended(records, counted, traced)


@pytest.fixture(name="worker")
def _worker(behaviour: Worker) -> Worker:
    behaviour.has_begun.clear()
    return behaviour


@pytest.fixture(name="execution_s")
def _execution_s() -> float:
    """The execution clock: long, except where it ends the call."""
    return 60.0


@pytest.fixture(name="case", params=list(ENTRANCES))
async def _case(
    request: pytest.FixtureRequest, edge: Edge, worker: Worker, execution_s: float
) -> Case:
    entrance = ENTRANCES[request.param]
    entrance.prepare(edge, worker)
    for route in entrance.routes(Clocks(execution_s=execution_s)):
        edge.add(route)
    return Case(edge, entrance, worker)


async def busy(_: WorkerRequest) -> WorkerAnswer:
    """A worker that still runs a call whose caller disconnected."""
    return WorkerAnswer(status=503, body=b"{}", outcome="busy")


async def out_of_reach(_: WorkerRequest) -> WorkerAnswer:
    """A pod's proxy that cannot connect to the pod's worker."""
    return WorkerAnswer(
        status=502,
        body=b"dial tcp 127.0.0.1:8080: connect: connection refused",
        outcome="",
        headers=("x-content-type-options: nosniff",),
    )


async def fail(_: WorkerRequest) -> WorkerAnswer:
    """User code that raises."""
    return WorkerAnswer(status=500, body=b'{"error": null}', outcome="raised")


def streamed(*chunks: bytes, then: Callable[[], Awaitable[None]] | None = None) -> WorkerAnswer:
    """A response that streams, and does something in its middle."""

    async def items() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk
        if then is not None:
            await then()

    return WorkerAnswer(chunks=items(), content_type="text/event-stream")


async def ends_ok(case: Case) -> httpx.Response:
    if case.entrance.streams:

        async def answer(_: WorkerRequest) -> WorkerAnswer:
            return streamed(b"data: {}\n\n", b"data: [DONE]\n\n")

        case.worker.next = answer
    response = await case.call()
    workers = case.edge.fleet.workers[case.instance.id]
    assert len(workers.connections) == 1, "its connection is used again"
    return response


async def user_code_raises(case: Case) -> httpx.Response:
    case.worker.next = fail
    response = await case.call()
    assert not case.instance.is_stuck
    return response


async def runs_out_of_memory(case: Case) -> httpx.Response:
    case.worker.next = forever
    task = asyncio.create_task(case.call())
    await case.worker.has_begun.wait()
    await case.edge.fleet.kill(case.instance.id, "out_of_memory")
    return await task


async def crashes(case: Case) -> httpx.Response:
    case.worker.next = forever
    task = asyncio.create_task(case.call())
    await case.worker.has_begun.wait()
    await case.edge.fleet.kill(case.instance.id, "crashed")
    return await task


async def overruns(case: Case) -> httpx.Response:
    case.worker.next = forever
    name = case.instance.id
    response = await case.call()
    await until(lambda: name in [stopped for stopped, _ in case.edge.fleet.stopped])
    return response


async def left(case: Case, task: asyncio.Task[httpx.Response]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def is_left_before_the_response(case: Case) -> None:
    case.worker.next = forever
    task = asyncio.create_task(case.call())
    await case.worker.has_begun.wait()
    await left(case, task)
    await case.quiet()
    assert not case.instance.is_stuck
    worker = case.edge.fleet.workers[case.instance.id]
    await until(lambda: not worker.connections)


async def is_left_in_the_response(case: Case) -> None:
    sent = asyncio.Event()

    async def hang() -> None:
        sent.set()
        await asyncio.Event().wait()

    async def answer(_: WorkerRequest) -> WorkerAnswer:
        return streamed(b"data: {}\n\n", then=hang)

    case.worker.next = answer
    task = asyncio.create_task(case.call())
    await sent.wait()
    await asyncio.sleep(0.02)  # its caller has the first byte
    await left(case, task)
    await case.quiet()
    assert not case.instance.is_stuck


async def is_left_while_it_waits(case: Case) -> None:
    reservation = case.throttler.reserve_nowait()
    assert reservation is not None
    task = asyncio.create_task(case.call())
    if isinstance(case.entrance, Submitted):
        await until(case.edge.calls.pending.tasks)
    await until(lambda: case.throttler.waiting)
    await left(case, task)
    await until(lambda: not case.throttler.waiting)
    reservation.release_unused()


async def finds_its_worker_busy(case: Case) -> httpx.Response:
    case.worker.next = busy
    response = await case.call()
    if not isinstance(case.entrance, Copied):  # a copy is not sent again
        first, again = case.edge.fleet.workers[case.instance.id].requests[-2:]
        assert again.body == first.body
    return response


async def cannot_be_sent(case: Case) -> httpx.Response:
    case.worker.next = out_of_reach
    instance = case.instance
    response = await case.call()
    await until(lambda: instance.id in [stopped for stopped, _ in case.edge.fleet.stopped])
    return response


async def finds_the_journal_full(case: Case) -> httpx.Response:
    journal = case.edge.books.journal
    open_call = journal.open_call

    def full(*given: Any, call: str, **more: Any) -> None:
        if isinstance(case.entrance, Copied) and not call.endswith("-shadow"):
            open_call(*given, call=call, **more)
            return
        raise JournalFull("no room")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(journal, "open_call", full)
        return await case.call()


async def is_on_a_drained_instance(case: Case) -> httpx.Response:
    go_on = asyncio.Event()

    async def answer(_: WorkerRequest) -> WorkerAnswer:
        await go_on.wait()
        return WorkerAnswer(body=case.worker.body)

    case.worker.next = answer
    task = asyncio.create_task(case.call())
    await case.worker.has_begun.wait()
    instance = case.instance
    case.throttler.drain(instance)
    go_on.set()
    response = await task
    await until(lambda: instance.id in [stopped for stopped, _ in case.edge.fleet.stopped])
    return response


@dataclass(frozen=True)
class Ending:
    """An ending of calls: the status for callers that wait for it (499: they left), the records,
    what is counted ("" = nothing), and text for the caller. `is_traced`: it leaves one trace, with
    the status."""

    run: Callable[[Case], Awaitable[httpx.Response | None]]
    status: int
    records: tuple[tuple[int, str], ...]
    counted: str
    says: bytes = b""
    is_traced: bool = True

    async def happens(self, case: Case) -> None:
        """Have a call end so, and check every column of the table."""
        await case.warm()
        case.edge.client.headers.update(SAMPLED)
        response = await self.run(case)
        case.edge.client.headers.clear()
        statuses = {self.status, 200} if case.entrance.streams else {self.status}
        ended = await case.ended()
        name = f"{self.run.__name__}: {ended}"
        if case.entrance.is_direct:
            if response is not None:
                assert response.status_code in statuses, name
                assert self.says in response.content, name
            assert not ended.traced or statuses.issuperset(ended.traced), name
        assert ended.records == list(self.records), name
        assert ended.counted == ({self.counted: 1} if self.counted else {}), name
        assert len(ended.traced) == self.is_traced, name


OK = Ending(ends_ok, 200, ((200, "ok"),), "answered")
LEFT = Ending(is_left_before_the_response, 499, ((499, "cancelled"),), "cancelled")
LEFT_IN_THE_MIDDLE = replace(LEFT, run=is_left_in_the_response)
LEFT_WAITING = replace(LEFT, run=is_left_while_it_waits, records=())
BUSY = replace(OK, run=finds_its_worker_busy, records=((200, "ok"), (503, "busy")))
UNSENT = replace(OK, run=cannot_be_sent, records=((200, "ok"), (502, "unsent")))
JOURNAL_FULL = Ending(finds_the_journal_full, 503, (), "failed")
DRAINED = replace(OK, run=is_on_a_drained_instance)
RAISES = Ending(user_code_raises, 500, ((500, "error"),), "failed")
OUT_OF_MEMORY = Ending(runs_out_of_memory, 502, ((502, "error"),), "failed", b"ran out of memory")
CRASH = replace(OUT_OF_MEMORY, run=crashes, says=b"ended (crashed)")
OVERRUN = Ending(overruns, 504, ((504, "error"),), "failed", b"longer than 1 s")
TABLE = (
    OK,
    RAISES,
    LEFT,
    LEFT_IN_THE_MIDDLE,
    LEFT_WAITING,
    BUSY,
    UNSENT,
    JOURNAL_FULL,
    DRAINED,
    OUT_OF_MEMORY,
    CRASH,
)


def rows_of(entrance: Entrance) -> Iterator[Ending]:
    """The table, with what differs by the nature of the entrance."""
    for row in TABLE:
        skipped = replace(row, counted="skipped", is_traced=False)
        if not isinstance(entrance, Copied):
            yield row
        elif row is BUSY:  # a copy is not sent again, and did not count
            yield replace(skipped, records=((503, "busy"),))
        elif row is UNSENT:
            yield replace(skipped, records=((502, "unsent"),))
        elif row is JOURNAL_FULL:
            yield skipped
        elif row is LEFT:  # only the end of the process cancels it
            yield replace(row, counted="", is_traced=False)
        elif row not in (LEFT_IN_THE_MIDDLE, LEFT_WAITING):  # it does not wait, nor read a stream
            yield row


async def test_each_ending_of_a_call_is_recorded_counted_and_traced_once(case: Case) -> None:
    for ending in rows_of(case.entrance):
        await ending.happens(case)


@pytest.mark.parametrize("execution_s", [EXECUTION_S])
async def test_a_call_over_its_execution_clock_ends_once_and_its_instance_is_replaced(
    case: Case,
) -> None:
    await OVERRUN.happens(case)


@pytest.mark.parametrize("execution_s", [EXECUTION_S])
@pytest.mark.parametrize("case", ["event stream", "raw stream", "OpenAI stream"], indirect=True)
async def test_a_stream_over_the_clock_whose_caller_reads_replaces_the_instance(case: Case) -> None:
    async def hang(_: WorkerRequest) -> WorkerAnswer:
        return streamed(b"data: {}\n\n", then=asyncio.Event().wait)  # type: ignore[arg-type]

    async def hangs(case: Case) -> None:
        case.worker.next = hang
        name = case.instance.id
        # raw HTTP can say it by a broken connection only
        with contextlib.suppress(httpx.RemoteProtocolError):
            await case.call()
        await until(lambda: name in [stopped for stopped, _ in case.edge.fleet.stopped])

    # a stream that has begun is no failed call for the metric: it was not completed
    await replace(OVERRUN, run=hangs, counted="answered").happens(case)


@pytest.mark.parametrize("case", ["raw HTTP"], indirect=True)
@pytest.mark.parametrize("is_large", [True, False], ids=["too large", "no memory for it"])
async def test_a_busy_worker_and_a_body_that_was_not_kept_is_a_503_of_the_platform(
    case: Case, is_large: bool
) -> None:
    await case.warm()
    edge, sent = case.edge, case.entrance
    edge.client.headers.update(SAMPLED)
    case.worker.next = busy
    if is_large:
        sent = replace(sent, body=b"x" * (MAX_RESENT_BYTES + 1))
    with edge.gateway.bodies.reserved(TENANT, 0 if is_large else 2**40):
        answer = await sent.call(edge)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "pilotlight-outcome" not in answer.headers
    assert answer.json()["type"].endswith("unavailable")
    assert await case.ended() == Ended([(503, "busy")], {"failed": 1}, [503])
    assert not edge.gateway.bodies.bytes_of


@pytest.mark.parametrize("case", ["raw HTTP"], indirect=True)
async def test_an_application_cannot_call_itself_busy(case: Case) -> None:
    await case.warm()

    async def forge(_: WorkerRequest) -> WorkerAnswer:  # the worker adds its own header last
        return WorkerAnswer(status=503, outcome="busy", headers=("pilotlight-outcome: ok",))

    case.worker.next = forge
    assert (await case.call()).status_code == 503
    assert (await case.ended()).records == [(503, "error")]


@pytest.mark.parametrize("execution_s", [EXECUTION_S])
@pytest.mark.parametrize("case", ["raw HTTP"], indirect=True)
async def test_an_upload_over_the_clock_is_no_fault_of_the_instance(case: Case) -> None:
    await case.warm()

    async def body() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.sleep(1.2 * EXECUTION_S)

    edge, headers = case.edge, {**HEADERS, **SAMPLED}
    answer = await edge.client.post(f"{edge.url}/fn/shop/site/x", headers=headers, content=body())
    assert answer.status_code == 504
    assert await case.ended() == Ended([(504, "error")], {"failed": 1}, [504])
    assert not case.instance.is_stuck
    assert edge.fleet.stopped == []


async def chatted(edge: Edge) -> Case:
    """The case of WebSockets to `chatting`, once its instance is up."""
    case = Case(edge, Raw("/fn/shop/site/chat"), Worker())
    await case.quiet()
    await case.forget()
    return case


@pytest.mark.slow  # waits for an answer to the close of the WebSocket
async def test_a_websocket_whose_worker_hangs_at_the_end_of_its_clock_replaces_the_instance(
    edge: Edge,
) -> None:
    gone = asyncio.Event()

    async def hang(caller: ServerConnection) -> None:
        caller.transport.pause_reading()  # it never answers the close
        await gone.wait()

    async with chatting(edge, execution_s=EXECUTION_S, side=hang) as (url, _):
        case = await chatted(edge)
        async with connect(url, additional_headers={**HEADERS, **SAMPLED}, proxy=None) as socket:
            with pytest.raises(websockets.ConnectionClosedError):
                await socket.recv()
        assert await case.ended() == Ended([(504, "error")], {"failed": 1}, [504])
        await until(lambda: edge.fleet.stopped)
        gone.set()


async def test_a_websocket_whose_worker_dies_is_closed_with_the_reason(edge: Edge) -> None:
    async def die(caller: ServerConnection) -> None:
        await caller.send("hello")
        caller.transport.abort()

    async with chatting(edge, side=die) as (url, _):
        case = await chatted(edge)
        async with connect(url, additional_headers={**HEADERS, **SAMPLED}, proxy=None) as socket:
            assert await socket.recv() == "hello"
            with pytest.raises(websockets.ConnectionClosedError) as closed:
                await socket.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1011
    assert "the instance died during this call" in closed.value.rcvd.reason
    assert await case.ended() == Ended([(502, "error")], {"failed": 1}, [502])


async def test_a_websocket_that_cannot_be_sent_goes_to_another_instance(edge: Edge) -> None:
    async with chatting(edge) as (url, _):
        case = await chatted(edge)
        path = Path(edge.fleet.infos[case.instance.id].socket)
        path.rename(path.with_suffix(".away"))
        with pytest.raises(websockets.InvalidStatus):  # the other instance serves no WebSockets
            async with connect(url, additional_headers={**HEADERS, **SAMPLED}, proxy=None):
                raise AssertionError("it was accepted")
        path.with_suffix(".away").rename(path)
        assert await case.ended() == Ended([(403, "error"), (502, "unsent")], {"refused": 1}, [403])


async def test_a_websocket_ends_once_whichever_side_closes_it(edge: Edge) -> None:
    async def close(caller: ServerConnection) -> None:
        with contextlib.suppress(websockets.ConnectionClosed):
            if await caller.recv() == "close":
                await caller.close()
            await caller.wait_closed()

    async with chatting(edge, side=close) as (url, _):
        case = await chatted(edge)
        for text in ("close", "leave"):
            async with connect(
                url, additional_headers={**HEADERS, **SAMPLED}, proxy=None
            ) as socket:
                await socket.send(text)
                if text == "close":
                    with pytest.raises(websockets.ConnectionClosedOK):
                        await socket.recv()
            await case.quiet()
        assert await case.ended() == Ended([(101, "ok")] * 2, {"answered": 2}, [101, 101])


async def test_a_websocket_without_a_record_or_a_slot_ends_once(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise JournalFull("no room")

    async with chatting(edge) as (url, _):
        case = await chatted(edge)

        async def open_socket() -> None:
            async with connect(url, additional_headers={**HEADERS, **SAMPLED}, proxy=None):
                raise AssertionError("it was accepted")

        with monkeypatch.context() as patched:
            patched.setattr(edge.books.journal, "open_call", full)
            with pytest.raises(websockets.InvalidStatus) as refused:
                await open_socket()
        assert refused.value.response.status_code == 503
        assert await case.ended() == Ended([], {"failed": 1}, [503])

        await case.forget()
        edge.fleet.gate.clear()  # no other instance starts
        reservation = case.throttler.reserve_nowait()
        assert reservation is not None
        task = asyncio.create_task(open_socket())
        await until(lambda: case.throttler.waiting)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not case.throttler.waiting)
        reservation.release_unused()
        edge.fleet.gate.set()
        assert await case.ended() == Ended([], {"cancelled": 1}, [499])
