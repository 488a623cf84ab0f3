"""Due calls: each is run by one activator, whichever process is killed at whichever step.

The controller's side is its real tables and functions, behind a socket; the activator's is its real
journal and calls."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
import sqlalchemy as sa

from activator.async_calls.schedule_poller import SchedulePoller
from activator.settings import ActivatorSettings
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store
from pilotlight.controller.scheduling import batch_lines, dispatch_queue, submitted_calls
from pilotlight.core.transport.endpoint import Endpoint
from pilotlight.errors import Conflict, TooManyRequests
from pilotlight.protocol import CALLS_PATH, CallRecord
from pilotlight.spec.function import Clocks
from snapshotter.errors import NoCapacity
from tests.activator.conftest import Edge
from tests.activator.test_gateway import forever, until
from tests.fakes.databases import empty_sqlite
from tests.fakes.fake_worker import Behaviour, FakeWorker, WorkerAnswer, WorkerRequest, echo
from tests.fakes.routes import TENANT, route_of, spec_of


class ControlDesk:
    """The controller's part, at `path`. `loses` names the next answer that is lost on its way: what
    was done is done."""

    def __init__(self, path: Path, store: Store) -> None:
        self.server = FakeWorker(path, self._answer)
        self.store = store
        self.now = 1000.0
        self.loses = ""

    def add(
        self,
        call: str = "req-1",
        *,
        sequence: int = 1,
        tenant: str = TENANT,
        body: bytes = b'{"x":1}',
        key: str = dispatch_queue.SCHEDULER,
        batch: str = "",
        retry_until: float = 9e9,
    ) -> None:
        """A call of a schedule, of a key, or of a line of a batch becomes due."""
        record = CallRecord(
            id=call,
            tenant=tenant,
            environment="main",
            app="shop",
            function="hello",
            method="",
            state="QUEUED",
            sequence=sequence,
            submitted_at=self.now,
            expires_at=9e9,
            schedule="" if batch else "f-shop-hello/0",
            labels=batch_lines.labels_of(batch) if batch else {},
        )
        document = dispatch_queue.payload(record, body=body, key=key)
        with self.store.write() as write:
            if batch:
                document |= {"priority": "batch", "retry_until": retry_until}
                line = {**batch_lines.done(record), "is_done": False, "is_failed": False}
                write.sql.execute(
                    sa.insert(tables.batch_lines).values(
                        batch=batch, line=sequence, call=call, custom_id=call, **line
                    )
                )
            assert dispatch_queue.enqueue_call(write, document, due_at=self.now) == 1

    def line(self, call: str = "req-1") -> CallRecord | None:
        """How a line of a batch has ended; None = it has not."""
        c = tables.batch_lines.c
        with self.store.read() as sql:
            text = sql.execute(sa.select(c.record).where(c.call == call, c.is_done)).scalar()
        return None if text is None else CallRecord.from_json(json.loads(text))

    def state(self, call: str = "req-1") -> str:
        """As the controller knows it."""
        with self.store.read() as sql:
            return str(submitted_calls.get(sql, tenant=TENANT, call=call)["state"])

    async def _answer(self, request: WorkerRequest) -> WorkerAnswer:
        parts = urlsplit(request.path)
        body = await asyncio.to_thread(
            self._done, request.method, parts.path, parse_qs(parts.query), request.body
        )
        if self.loses == request.method:
            self.loses = ""
            return WorkerAnswer(status=502, body=b"{}")
        return WorkerAnswer(body=json.dumps(body).encode())

    def _done(
        self, method: str, path: str, query: dict[str, list[str]], body: bytes
    ) -> dict[str, Any]:
        with self.store.write() as write:
            if path == CALLS_PATH:
                items = json.loads(body)["calls"]
                submitted_calls.put(write, [CallRecord.from_json(item) for item in items])
                return {"accepted": len(items)}
            if method == "GET":
                return {
                    "calls": dispatch_queue.claim(
                        write, activator=query["activator"][0], without=query.get("without", [])
                    ),
                    "cancel": dispatch_queue.cancelled(write, activator=query["activator"][0]),
                }
            asked = json.loads(body)
            return {
                "yours": dispatch_queue.acknowledge(
                    write, activator=asked["activator"], ids=asked["ids"]
                )
            }


class Life:
    """One life of an activator over `directory`, ended by `die` as kill -9 ends it: nothing is
    told, the journal stays."""

    def __init__(
        self, directory: Path, desk: ControlDesk, behaviour: Behaviour, name: str = "a-0"
    ) -> None:
        self.edge = Edge(
            directory, ActivatorSettings(), behaviour, controller=Endpoint.at(desk.server.path)
        )
        self.edge.add(route_of(spec_of()))
        self.due = SchedulePoller(
            self.edge.calls,
            controller=Endpoint.at(desk.server.path),
            token="t",
            activator=name,
            wait_s=0,
        )
        self._tasks = [asyncio.create_task(self.edge.books.run())]
        self._group = asyncio.TaskGroup()

    async def begin(self) -> Life:
        """What the process does at its start."""
        await self._group.__aenter__()
        self._tasks += self.edge.calls.start(self._group)
        return self

    async def die(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.edge.calls.aclose()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._group.__aexit__(None, None, None)
        await self.edge.scaler.aclose()
        await self.due.aclose()
        await self.edge.client.aclose()
        await self.edge.control.aclose()
        await self.edge.fleet.aclose()
        await self.edge.books.aclose()

    @property
    def runs(self) -> list[tuple[str, str]]:
        """(call, attempt) as its workers were asked."""
        asked = [
            request for worker in self.edge.fleet.workers.values() for request in worker.requests
        ]
        return [
            (r.headers["pilotlight-call"], r.headers.get("pilotlight-attempt", "1")) for r in asked
        ]


@pytest.fixture(name="desk")
async def _desk(short_tmp: Path) -> AsyncIterator[ControlDesk]:
    store = Store(empty_sqlite(short_tmp / "controller.db"), clock=lambda: desk.now)
    desk = ControlDesk(short_tmp / "desk.sock", store)
    await desk.server.start()
    yield desk
    await desk.server.die()
    store.close()


@contextlib.asynccontextmanager
async def living(
    directory: Path, desk: ControlDesk, behaviour: Behaviour = echo, name: str = "a-0"
) -> AsyncIterator[Life]:
    directory.mkdir(exist_ok=True)
    life = await Life(directory, desk, behaviour, name).begin()
    try:
        yield life
    finally:
        await life.die()


async def test_a_due_call_wakes_its_function_at_zero_and_its_result_is_kept(
    short_tmp: Path, desk: ControlDesk
) -> None:
    desk.add()
    async with living(short_tmp / "0", desk) as life:
        assert life.edge.fleet.started == []
        await life.due.round()
        await until(lambda: desk.state() == "SUCCEEDED")
        await life.due.round()
        assert life.runs == [("req-1", "1")]
        records = await life.edge.settle()
        assert [(r.key, r.tenant, r.caller) for r in records.values()] == [
            ("scheduler", TENANT, "")
        ]


async def test_a_due_call_of_a_key_counts_against_that_keys_quotas(
    short_tmp: Path, desk: ControlDesk
) -> None:
    async with living(short_tmp / "0", desk) as life:
        life.edge.add_key("pl_small", quotas={"requests_per_s": 0.001, "burst": 1})
        for call in ("req-1", "req-2"):
            desk.add(call, key="k-pl_small")
            await life.due.round()
            await until(lambda: desk.state("req-1") == "SUCCEEDED")
        assert (desk.state("req-2"), life.runs) == ("QUEUED", [("req-1", "1")])
        records = await life.edge.settle()
        assert [record.key for record in records.values()] == ["k-pl_small"]


async def test_killed_before_it_wrote_a_call_down_it_is_given_it_again(
    short_tmp: Path, desk: ControlDesk
) -> None:
    desk.add()
    with desk.store.write() as write:
        # the answer reached a process that was killed
        assert len(dispatch_queue.claim(write, activator="a-0")) == 1
    async with living(short_tmp / "0", desk) as life:
        await life.due.round()
        await until(lambda: desk.state() == "SUCCEEDED")
        assert life.runs == [("req-1", "1")]


async def test_killed_after_it_wrote_a_call_down_it_asks_before_it_runs_it(
    short_tmp: Path, desk: ControlDesk
) -> None:
    desk.add()
    async with living(short_tmp / "0", desk) as life:
        with desk.store.write() as write:
            (kept,) = dispatch_queue.claim(write, activator="a-0")
        await life.edge.calls.store(kept)
        assert life.runs == []
    async with living(short_tmp / "0", desk) as life:
        assert (life.edge.calls.stored(), life.runs) == (["req-1/1"], [])
        await life.due.round()
        await until(lambda: desk.state() == "SUCCEEDED")
        assert life.runs == [("req-1", "1")]


async def test_killed_for_longer_than_its_claim_it_forgets_what_another_runs(
    short_tmp: Path, desk: ControlDesk
) -> None:
    desk.add()
    async with living(short_tmp / "0", desk) as life:
        with desk.store.write() as write:
            (kept,) = dispatch_queue.claim(write, activator="a-0")
        await life.edge.calls.store(kept)
    desk.now += dispatch_queue.CLAIM_S + 1
    async with living(short_tmp / "1", desk, name="a-1") as other:
        await other.due.round()
        await until(lambda: desk.state() == "SUCCEEDED")
        assert other.runs == [("req-1", "1")]
    async with living(short_tmp / "0", desk) as life:
        await life.due.round()
        assert (life.edge.calls.stored(), life.runs, len(life.edge.calls.pending)) == ([], [], 0)
        assert life.edge.books.journal.statistics().held_calls == 0


async def test_killed_when_the_controllers_word_was_lost_it_asks_again_and_runs_it(
    short_tmp: Path, desk: ControlDesk
) -> None:
    desk.add()
    async with living(short_tmp / "0", desk) as life:
        desk.loses = "POST"
        with pytest.raises(httpx.HTTPStatusError):
            await life.due.round()
        assert life.runs == []
    desk.now += 10 * dispatch_queue.CLAIM_S
    async with living(short_tmp / "1", desk, name="a-1") as other:
        await other.due.round()
        assert other.edge.calls.stored() == []  # it was taken for good
    async with living(short_tmp / "0", desk) as life:
        await life.due.round()
        await until(lambda: desk.state() == "SUCCEEDED")
        assert life.runs == [("req-1", "1")]


async def test_killed_while_it_ran_the_same_call_is_run_again_and_told_so(
    short_tmp: Path, desk: ControlDesk
) -> None:
    desk.add()
    async with living(short_tmp / "0", desk, forever) as life:
        await life.due.round()
        await until(lambda: life.runs)
        assert life.runs == [("req-1", "1")]
    async with living(short_tmp / "0", desk) as life:
        await life.due.round()
        await until(lambda: desk.state() == "SUCCEEDED")
        assert life.runs == [("req-1", "2")]


async def test_a_controller_that_lost_its_answer_hands_out_the_same_call_once(
    short_tmp: Path, desk: ControlDesk
) -> None:
    desk.add()
    async with living(short_tmp / "0", desk) as life:
        desk.loses = "GET"
        with pytest.raises(httpx.HTTPStatusError):
            await life.due.round()
        await life.due.round()
        await life.due.round()
        await until(lambda: desk.state() == "SUCCEEDED")
        assert life.runs == [("req-1", "1")]


async def test_two_activators_that_ask_at_once_share_what_is_due(
    short_tmp: Path, desk: ControlDesk
) -> None:
    for number in range(20):
        desk.add(f"req-{number}")
    async with (
        living(short_tmp / "0", desk) as one,
        living(short_tmp / "1", desk, name="a-1") as other,
    ):
        await asyncio.gather(one.due.round(), other.due.round())
        await until(
            lambda: all(desk.state(f"req-{n}") == "SUCCEEDED" for n in range(20)), timeout_s=30
        )
        assert sorted(one.runs + other.runs) == sorted((f"req-{n}", "1") for n in range(20))


async def test_a_function_that_is_gone_fails_the_call_and_says_so(
    short_tmp: Path, desk: ControlDesk
) -> None:
    desk.add()
    async with living(short_tmp / "0", desk) as life:
        life.edge.tell("function", f"{TENANT}/main/shop/hello", None)
        await life.due.round()
        await until(lambda: desk.state() == "FAILED")


async def test_what_is_kept_and_not_begun_is_found_and_not_lost_by_a_question(
    short_tmp: Path, desk: ControlDesk
) -> None:
    desk.add()
    async with living(short_tmp / "0", desk) as life:
        desk.loses = "POST"
        with pytest.raises(httpx.HTTPStatusError):
            await life.due.round()
        held = life.edge.calls.pending.get("req-1")
        assert held is not None
        assert held.record.state == "QUEUED"
        await life.due.round()
        await until(lambda: desk.state() == "SUCCEEDED")


class Refusing:
    """Has no room for calls of `full`. Owner: the test's loop."""

    def __init__(self, full: str, error: Exception) -> None:
        self.full, self.error = full, error
        self.refused = 0
        self.begun: list[str] = []
        self._kept: list[str] = []

    async def store(self, kept: dict[str, Any]) -> None:
        if kept["record"]["tenant"] == self.full:
            self.refused += 1
            raise self.error
        self._kept.append(kept["due"])

    def stored(self) -> list[str]:
        return list(self._kept)

    def begin_stored(self, asked: Collection[str], ours: Collection[str]) -> None:
        self.begun += [name for name in asked if name in ours]
        self._kept = [name for name in self._kept if name not in asked]

    async def cancel_stored(self, calls: Collection[str]) -> None:
        raise AssertionError(f"none of {calls} was cancelled")


@pytest.mark.parametrize(
    "error",
    [TooManyRequests("the bound", retry_after_s=5), Conflict("not told yet", retry_after_s=1)],
    ids=repr,
)
async def test_a_tenant_without_room_keeps_no_other_tenants_calls_back(
    desk: ControlDesk, error: Exception
) -> None:
    for number in range(300):
        desk.add(f"req-{number}", tenant="t-full")
    desk.add("req-others", tenant="t-other")
    keeper = Refusing("t-full", error)
    asking = SchedulePoller(
        keeper, controller=Endpoint.at(desk.server.path), token="t", activator="a-0", wait_s=0
    )
    try:
        await asking.round()
        desk.add("req-next", tenant="t-other")
        await asking.round()
        await asking.round()
    finally:
        await asking.aclose()
    assert keeper.begun == ["req-others/1", "req-next/1"]
    assert keeper.refused == 1, "it is left out for a while"


async def test_tenants_take_turns_and_an_answer_has_a_bound_in_bytes(desk: ControlDesk) -> None:
    for number in range(5):
        desk.add(f"req-{number}", tenant="t-large", body=b"x" * 3_000_000)
    desk.now += 1
    desk.add("req-small", tenant="t-small")

    def claimed() -> list[str]:
        with desk.store.write() as write:
            found = dispatch_queue.claim(write, activator="a-0")
            return dispatch_queue.acknowledge(
                write, activator="a-0", ids=[one["due"] for one in found]
            )

    assert claimed() == ["req-0/1", "req-small/1", "req-1/1"]
    assert claimed() == ["req-2/1", "req-3/1"]
    assert claimed() == ["req-4/1"]
    desk.add("req-huge", tenant="t-large", body=b"x" * 7_000_000)
    assert claimed() == ["req-huge/1"], "one that is larger than an answer comes alone"
    with desk.store.read() as sql:
        assert set(sql.execute(sa.select(tables.due_calls.c.document)).scalars()) == {"{}"}, (
            "journals have them now"
        )


async def test_a_line_of_a_batch_is_a_call_of_its_key_at_priority_batch(
    short_tmp: Path, desk: ControlDesk
) -> None:
    async with living(short_tmp / "0", desk, forever) as life:
        life.edge.add_key("pl_mine")
        desk.add(batch="batch_1", key="k-pl_mine")
        await life.due.round()
        await until(lambda: life.runs == [("req-1", "1")])
        held = life.edge.calls.pending.get("req-1")
        assert held is not None
        call = held.call
        assert call is not None
        assert (call.caller.rank.priority, call.caller.key_id) == ("batch", "k-pl_mine")
    async with living(short_tmp / "0", desk) as next_life:  # what its journal says of it
        next_life.edge.add_key("pl_mine")
        await next_life.due.round()
        await until(lambda: desk.line() is not None)
        assert next_life.runs == [("req-1", "2")]
        records = await next_life.edge.settle()
        assert {(r.call, r.key) for r in records.values()} == {("req-1", "k-pl_mine")}
    with desk.store.read() as sql:
        assert submitted_calls.known_state(sql, tenant=TENANT, call="req-1") is None


async def test_a_line_of_a_batch_waits_for_quotas_and_capacity_beyond_its_queue_time(
    short_tmp: Path, desk: ControlDesk
) -> None:
    async with living(short_tmp / "0", desk) as life:
        life.edge.add_key("pl_small", quotas={"requests_per_s": 1, "burst": 1})
        life.edge.add(route_of(spec_of(clocks=Clocks(queue_s=0.1))))
        life.edge.fleet.failures = [NoCapacity("memory")] * 2
        for line, call in enumerate(("req-1", "req-2"), 1):
            desk.add(call, batch="batch_1", sequence=line, key="k-pl_small")
        await life.due.round()
        await until(lambda: desk.line("req-1") is not None and desk.line("req-2") is not None)
    ended = [desk.line(call) for call in ("req-1", "req-2")]
    assert {one.state for one in ended if one is not None} == {"SUCCEEDED"}


async def test_a_line_of_a_batch_that_fails_is_no_dead_letter(
    short_tmp: Path, desk: ControlDesk
) -> None:
    async def raises(_: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(status=500, body=b"{}", outcome="raised")

    desk.add(batch="batch_1")
    async with living(short_tmp / "0", desk, raises) as life:
        await life.due.round()
        await until(lambda: desk.line() is not None)
    ended = desk.line()
    assert ended is not None
    assert (ended.state, ended.status, ended.is_dead) == ("FAILED", 500, False)


async def test_a_call_that_the_controller_cancels_is_cancelled_where_it_runs(
    short_tmp: Path, desk: ControlDesk
) -> None:
    desk.add("req-1", batch="batch_1")
    async with living(short_tmp / "0", desk, forever) as life:
        await life.due.round()
        await until(lambda: life.runs == [("req-1", "1")])
        desk.add("req-2", batch="batch_1", sequence=2)
        with desk.store.write() as write:
            assert dispatch_queue.cancel(write, ["req-1", "req-2"]) == ["req-2"]
        await life.due.round()
        await until(lambda: desk.line() is not None)
        ended = desk.line()
        assert ended is not None
        assert (ended.state, ended.status) == ("CANCELLED", 499)
        await life.due.round()  # it is named once more only after a while
        assert life.runs == [("req-1", "1")]


async def test_a_cancelled_call_whose_activator_is_killed_is_cancelled_by_its_next_life(
    short_tmp: Path, desk: ControlDesk
) -> None:
    desk.add(batch="batch_1")
    async with living(short_tmp / "0", desk, forever) as life:
        await life.due.round()
        await until(lambda: life.runs == [("req-1", "1")])
    with desk.store.write() as write:
        assert dispatch_queue.cancel(write, ["req-1"]) == []
        assert dispatch_queue.cancelled(write, activator="a-0") == ["req-1"]  # it was killed then
    async with living(short_tmp / "0", desk, forever) as life:
        await life.due.round()
        desk.now += dispatch_queue.CLAIM_S
        await life.due.round()
        await until(lambda: desk.line() is not None)


async def test_arguments_of_a_line_of_a_batch_are_checked_before_anything_is_started(
    short_tmp: Path, desk: ControlDesk
) -> None:
    async with living(short_tmp / "0", desk) as life:
        life.edge.add_key("pl_mine")
        desk.add(batch="batch_1", body=b'{"x":"one"}', key="k-pl_mine")
        await life.due.round()
        await until(lambda: desk.line() is not None)
        assert life.edge.fleet.started == []
    ended = desk.line()
    assert ended is not None
    assert (ended.state, ended.status) == ("FAILED", 400)
