"""A journal whose activator is gone for good: all of it reaches the controller, once, whatever is
killed on the way.

The controller's side is its real tables and functions, behind a socket; only the ledger is a list.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from activator.billing.errors import JournalInUse
from activator.billing.journal import Journal
from activator.billing.journal_drain import DrainResult, drain_journal
from pilotlight.controller.database.store import Store
from pilotlight.controller.scheduling import dispatch_queue, submitted_calls
from pilotlight.core.crypto import PlatformKey
from pilotlight.core.settings import Paths, PlatformSettings
from pilotlight.core.transport.endpoint import Endpoint
from pilotlight.protocol import CALLS_PATH, DUE_PATH, USAGE_PATH, CallRecord
from tests.activator.billing_world import SECOND, account, open_attempt
from tests.fakes.databases import empty_sqlite
from tests.fakes.fake_worker import FakeWorker, WorkerAnswer, WorkerRequest
from tests.fakes.routes import TENANT

ROOT = Path(__file__).parents[3]
GONE = "a-7"


class Desk:
    """The controller, at `path`.

    Attributes:
        usage: ids of usage records, in the order in which they came; each once.
        refuses: ids that the ledger takes never.
        holds: path of requests that are done, and not answered.
        held: set when one is.
    """

    def __init__(self, path: Path, store: Store) -> None:
        self.server = FakeWorker(path, self._answer)
        self.store = store
        self.usage: list[str] = []
        self.refuses: frozenset[str] = frozenset()
        self.holds = ""
        self.held = asyncio.Event()

    async def _answer(self, request: WorkerRequest) -> WorkerAnswer:
        path = request.path.partition("?")[0]
        status, body = self._done(request.method, path, json.loads(request.body))
        if path == self.holds:
            self.held.set()
            await asyncio.Event().wait()
        return WorkerAnswer(status=status, body=json.dumps(body).encode())

    def _done(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == USAGE_PATH:
            ids = [record["id"] for record in body["records"]]
            if self.refuses & set(ids):
                return 422, {}
            self.usage += [one for one in ids if one not in self.usage]
            return 200, {"accepted": len(ids), "budgets": {}}
        with self.store.write() as write:
            if path == CALLS_PATH:
                submitted_calls.put(write, [CallRecord.from_json(item) for item in body["calls"]])
                return 200, {"accepted": len(body["calls"])}
            assert path == DUE_PATH
            if method == "POST":
                return 200, {
                    "yours": dispatch_queue.acknowledge(
                        write, activator=body["activator"], ids=body["ids"]
                    )
                }
            return 200, {
                "accepted": sum(
                    dispatch_queue.take_over(write, held, activator=body["activator"])
                    for held in body["calls"]
                )
            }

    def for_others(self) -> list[dict[str, Any]]:
        """What the next activator that asks is given."""
        with self.store.write() as write:
            return dispatch_queue.claim(write, activator="a-0")

    def state(self, call: str) -> str:
        """As callers see it."""
        with self.store.read() as sql:
            return str(submitted_calls.get(sql, tenant=TENANT, call=call)["state"])


def record(call: str, **more: Any) -> CallRecord:
    values: dict[str, Any] = {
        "id": call,
        "tenant": TENANT,
        "environment": "main",
        "app": "shop",
        "function": "hello",
        "method": "",
        "state": "QUEUED",
        "sequence": 1,
        "submitted_at": 1000.0,
        "expires_at": 9e9,
        **more,
    }
    return CallRecord(**values)


def kept(call: str) -> dict[str, Any]:
    body = base64.b64encode(b'{"x":1}').decode()
    return {
        "record": record(call).to_json(),
        "owner": TENANT,
        "key": "k-1",
        "content_type": "application/json",
        "accept": "",
        "body": body,
    }


async def left_behind(home: Path) -> None:
    """An activator ran, and was killed: a call in flight, one that was billed, a submitted one
    unfinished, one whose end was not told."""
    home.mkdir(parents=True, exist_ok=True)
    journal, _ = Journal.open(home, activator=GONE)
    running = asyncio.create_task(journal.run())
    books = account(journal)
    for call in ("done", "open"):
        ticket = open_attempt(
            books,
            call=call,
            start_kind="FORK",
            queued_ms=1,
            start_ms=1,
            now_ns=SECOND,
            at_ns=1000 * SECOND,
        )
        if call == "done":
            books.close(ticket, status=200, outcome="ok", now_ns=2 * SECOND, at_ns=1001 * SECOND)
    for call in ("unfinished", "ended"):
        await journal.submit(call, kept(call))
    journal.finish("ended", record("ended", state="SUCCEEDED", sequence=3, result="MQ==").to_json())
    await journal.wait_synced()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    journal.abandon()


@pytest.fixture(name="desk")
async def _desk(short_tmp: Path) -> AsyncIterator[Desk]:
    store = Store(empty_sqlite(short_tmp / "controller.db"), clock=lambda: 2000.0)
    paths = Paths.of(PlatformSettings(home=str(short_tmp)), {}).make()
    desk = Desk(paths.socket("controller"), store)
    await desk.server.start()
    if paths.activator_uid is not None:  # the process that drains is none of root's
        os.chown(desk.server.path, -1, paths.activator_uid)
        desk.server.path.chmod(0o660)
    yield desk
    await desk.server.aclose()
    store.close()


async def drained(home: Path, desk: Desk, *, patience_s: float = 20.0) -> DrainResult:
    return await drain_journal(
        home,
        activator=GONE,
        controller=Endpoint.at(desk.server.path),
        token="t",
        patience_s=patience_s,
    )


async def test_all_of_it_reaches_the_controller(short_tmp: Path, desk: Desk) -> None:
    await left_behind(home := short_tmp / "j")

    done = await drained(home, desk)

    assert done == DrainResult(lost=1, records=2, results=1, handed_on=1, left="")
    assert desk.usage == ["done/1", "open/1"]
    assert desk.state("ended") == "SUCCEEDED"
    [given] = desk.for_others()
    assert given["record"]["id"] == "unfinished"
    assert (given["key"], base64.b64decode(given["body"])) == ("k-1", b'{"x":1}')
    assert desk.state("unfinished") == "QUEUED"


async def test_again_there_is_nothing_to_do(short_tmp: Path, desk: Desk) -> None:
    await left_behind(home := short_tmp / "j")
    await drained(home, desk)
    again = await drained(home, desk)
    assert again == DrainResult(lost=0, records=0, results=0, handed_on=0, left="")
    assert len(desk.for_others()) == 1


async def test_attempts_that_were_made_count_on(short_tmp: Path, desk: Desk) -> None:
    (home := short_tmp / "j").mkdir()
    journal, _ = Journal.open(home, activator=GONE)
    await asyncio.gather(journal.submit("c", kept("c")), journal.sync())
    books = account(journal)
    for attempt in (1, 2):
        open_attempt(
            books,
            call="c",
            attempt=attempt,
            start_kind="FORK",
            queued_ms=1,
            start_ms=1,
            now_ns=1,
            at_ns=SECOND,
        )
    journal.abandon()
    await drained(home, desk)
    assert [given["record"]["attempt"] for given in desk.for_others()] == [2]


async def test_a_due_call_that_is_another_activators_by_now_is_forgotten(
    short_tmp: Path, desk: Desk
) -> None:
    with desk.store.write() as write:
        dispatch_queue.enqueue_call(
            write, dispatch_queue.payload(record("c"), body=b"{}"), due_at=0.0
        )
        [given] = dispatch_queue.claim(write, activator="a-1")
        assert dispatch_queue.acknowledge(write, activator="a-1", ids=[given["due"]]) == ["c/1"]
    (home := short_tmp / "j").mkdir()
    journal, _ = Journal.open(home, activator=GONE)
    await asyncio.gather(journal.submit("c", given), journal.sync())
    journal.abandon()
    assert await drained(home, desk) == DrainResult(
        lost=0, records=0, results=0, handed_on=0, left=""
    )
    assert desk.for_others() == []


async def test_a_call_that_ended_after_all_is_not_run_again(short_tmp: Path, desk: Desk) -> None:
    with desk.store.write() as write:
        submitted_calls.put(write, [record("unfinished", state="SUCCEEDED", sequence=5)])
    await left_behind(home := short_tmp / "j")
    assert (await drained(home, desk)).left == ""
    assert desk.for_others() == []
    assert desk.state("unfinished") == "SUCCEEDED"


async def test_without_a_controller_it_says_what_is_left(short_tmp: Path, desk: Desk) -> None:
    await left_behind(home := short_tmp / "j")
    await desk.server.die()
    done = await drained(home, desk, patience_s=0.3)
    assert (
        done.left
        == "2 usage records, 2 submitted calls: the controller did not accept it within 0.3 s"
    )


async def test_records_that_were_refused_for_good_are_named(short_tmp: Path, desk: Desk) -> None:
    desk.refuses = frozenset({"open/1"})
    await left_behind(home := short_tmp / "j")
    done = await drained(home, desk)
    assert "refused.ndjson" in done.left
    assert desk.usage == ["done/1"]


async def test_a_journal_in_use_is_left_alone(short_tmp: Path, desk: Desk) -> None:
    await left_behind(home := short_tmp / "j")
    journal, _ = Journal.open(home, activator=GONE)
    with pytest.raises(JournalInUse):
        await drained(home, desk)
    journal.abandon()


# -- the process -----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def process(short_tmp: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    config = short_tmp / "platform.yaml"
    config.write_text(f"platform: {{home: {short_tmp}, run: {short_tmp / 'run'}}}\n")
    # as the controller does
    PlatformKey.load_or_create(short_tmp / "platform.key").activator.write(
        short_tmp / "activator.key"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'functions'}"}
    arguments = ("-m", "activator", "--config", str(config), "--index", "7", "--drain-journal")
    started = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, env=environment, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
            await started.communicate()


@pytest.mark.parametrize("held", [USAGE_PATH, CALLS_PATH, DUE_PATH])
async def test_killed_when_the_controller_has_taken_something_it_goes_on_where_it_was(
    short_tmp: Path, desk: Desk, held: str
) -> None:
    await left_behind(short_tmp / "activator" / GONE)
    desk.holds = held
    async with process(short_tmp) as killed:
        ends = [asyncio.create_task(desk.held.wait()), asyncio.create_task(killed.wait())]
        await asyncio.wait(ends, timeout=50, return_when=asyncio.FIRST_COMPLETED)
        ends[0].cancel()
        if killed.returncode is None:
            killed.send_signal(signal.SIGKILL)
        _, said = await killed.communicate()
        assert desk.held.is_set(), f"it ended with {killed.returncode}: {said.decode()}"
    desk.holds = ""

    async with process(short_tmp) as again:
        _, said = await again.communicate()

    assert again.returncode == 0, said.decode()
    assert desk.usage == ["done/1", "open/1"]
    assert desk.state("ended") == "SUCCEEDED"
    assert [given["record"]["id"] for given in desk.for_others()] == ["unfinished"]
