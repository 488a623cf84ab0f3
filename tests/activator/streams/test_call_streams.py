"""Streams of submitted calls: read from any place, by anybody who may, as long as there is a
result."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from activator.settings import ActivatorSettings
from pilotlight.protocol import PROBLEM_BASE
from pilotlight.spec.function import Clocks, MethodSpec
from pilotlight.spec.policies import RetryPolicy
from tests.activator.conftest import KEY, PATIENCE_S, Edge
from tests.activator.streams.world import GENERATOR, OFTEN_S, Released
from tests.activator.test_gateway import until
from tests.fakes.calls import call_of
from tests.fakes.fake_controller import FakeController
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.routes import route_of, spec_of, target_of

AUTHORIZED = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(autouse=True)
def _controller_is_up(controller: FakeController) -> None:
    """Where results go."""


class Follower:
    """One reader. `items` are (id, data) of what had an id, `others` (name, data) of the rest."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()
        self.items: list[tuple[str, str]] = []
        self.others: list[tuple[str, Any]] = []
        self.comments = 0

    async def next(self) -> str:
        """One event or comment more; its name, or its data where it has no name."""
        fields: dict[str, str] = {}
        async with asyncio.timeout(PATIENCE_S):
            while line := await anext(self._lines):
                name, _, value = line.partition(": ")
                fields[name] = value
        if not fields or "" in fields:
            self.comments += 1
            return ":"
        if "id" in fields:
            self.items.append((fields["id"], fields["data"]))
        else:
            self.others.append((fields["event"], json.loads(fields["data"])))
        return fields.get("event", fields["data"])

    async def until(self, what: str) -> None:
        """Read until it has come."""
        while await self.next() != what:
            pass

    async def end(self) -> dict[str, Any]:
        """Read to the end; what the end event says."""
        await self.until("end")
        said: dict[str, Any] = self.others[-1][1]
        return said


@asynccontextmanager
async def following(edge: Edge, call_id: str, after: str = "") -> AsyncIterator[Follower]:
    headers = {**AUTHORIZED, **({"last-event-id": after} if after else {})}
    async with edge.client.stream(
        "GET", f"{edge.url}/v1/calls/{call_id}/stream", headers=headers
    ) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream"
        yield Follower(response)


async def submit(edge: Edge, **more: Any) -> str:
    accepted = await edge.call("shop/hello:submit", json={}, **more)
    assert accepted.status_code == 202
    return str(accepted.json()["id"])


async def test_items_are_read_as_they_are_made_each_with_an_id(
    generator: Edge, worker: Released
) -> None:
    call_id = await submit(generator)
    async with following(generator, call_id) as reader:
        for n in range(20):
            worker.put(b"%d\n" % n)
            await reader.until(str(n))
        worker.put(None)
        end = await reader.end()

    assert reader.items == [(f"1-{n + 1}", str(n)) for n in range(20)]
    assert (end["finish_reason"], end["state"], end["id"], end["attempt"]) == (
        "stop",
        "SUCCEEDED",
        call_id,
        1,
    )
    assert [name for name, _ in reader.others] == ["state"] * (len(reader.others) - 1) + ["end"]
    (record,) = (await generator.settle()).values()
    assert (record.finish, record.outcome, end["cost"]) == ("stop", "ok", record.cost)


async def test_a_reader_that_comes_again_gets_what_followed_its_last_event(
    generator: Edge, worker: Released
) -> None:
    call_id = await submit(generator)
    worker.put(b"0\n1\n", b"2\n")
    async with following(generator, call_id) as reader:
        await reader.until("1")
        position = reader.items[-1][0]
    worker.put(b"3\n")
    async with following(generator, call_id, after=position) as again:
        await again.until("3")
        worker.put(None)
        assert (await again.end())["finish_reason"] == "stop"

    assert [data for _, data in again.items] == ["2", "3"]
    assert again.items[0][0] == "1-3"


async def test_several_readers_read_at_their_own_pace(generator: Edge, worker: Released) -> None:
    call_id = await submit(generator)
    worker.put(b"0\n", b"1\n", b"2\n")
    async with (
        following(generator, call_id) as one,
        following(generator, call_id, after="1-2") as two,
        following(generator, call_id) as lazy,
    ):
        await one.until("2")
        await two.until("2")
        worker.put(b"3\n", None)
        await one.end()
        await two.end()
        await lazy.end()  # begins to read now that all is over

    assert [len(reader.items) for reader in (one, two, lazy)] == [4, 2, 4]


async def test_a_reader_that_comes_after_the_end_gets_it_all(
    generator: Edge, worker: Released
) -> None:
    call_id = await submit(generator)
    worker.put(b"0\n", b"1\n", None)
    await until(lambda: all(held.record.finished_at for held in generator.calls.pending))
    async with following(generator, call_id) as reader:
        assert (await reader.end())["finish_reason"] == "stop"
    async with following(generator, call_id, after="1-1") as again:
        await again.end()

    assert reader.items == [("1-1", "0"), ("1-2", "1")]
    assert again.items == [("1-2", "1")]


async def test_a_call_that_is_the_controllers_by_now_is_streamed_from_its_result(
    generator: Edge, worker: Released, controller: FakeController, shipping: object
) -> None:
    call_id = await submit(generator)
    worker.put(b"0\n", b"1\n", None)
    await until(lambda: not generator.calls.pending and call_id in controller.calls)
    async with following(generator, call_id, after="1-1") as reader:
        end = await reader.end()

    assert (reader.items, end["finish_reason"]) == ([("1-2", "1")], "stop")


async def test_one_that_still_runs_at_an_activator_that_is_away_is_asked_for_again(
    generator: Edge, controller: FakeController
) -> None:
    controller.calls["req-elsewhere"] = {"id": "req-elsewhere", "state": "RUNNING", "labels": {}}
    answer = await generator.client.get(
        f"{generator.url}/v1/calls/req-elsewhere/stream", headers=AUTHORIZED
    )

    assert (answer.status_code, "retry-after" in answer.headers) == (503, True)


async def test_an_attempt_that_is_made_again_counts_its_items_from_the_beginning(
    edge: Edge, worker: Released, controller: FakeController
) -> None:
    policy = RetryPolicy(max_retries=1, initial_delay_s=0.0, max_delay_s=0.0)
    edge.add(route_of(spec_of(methods=GENERATOR, retries=policy)))
    call_id = await submit(edge)
    async with following(edge, call_id) as reader:
        worker.put(b"0\n", b"1\n")
        await reader.until("1")
        await edge.fleet.kill(edge.fleet.started[0], "killed")
        worker.put(b"10\n", b"11\n", None)
        await reader.end()
    async with following(edge, call_id, after="1-1") as late:
        await late.end()

    assert reader.items == [("1-1", "0"), ("1-2", "1"), ("2-1", "10"), ("2-2", "11")]
    assert late.items == [("2-1", "10"), ("2-2", "11")]  # of the first attempt nothing is left
    assert {"RUNNING", "QUEUED"} >= {
        body["state"] for name, body in reader.others if name == "state"
    }
    assert max(body["attempt"] for _, body in reader.others) == 2


async def test_a_generator_that_raises_fails_its_call_and_its_stream(
    generator: Edge, worker: Released, controller: FakeController
) -> None:
    problem = json.dumps(
        {"type": PROBLEM_BASE + "function-raised", "status": 500, "detail": "no"}
    ).encode()
    worker.trailers = ("pilotlight-finish: error",)
    worker.put(b"0\n", problem + b"\n", None)
    call_id = await submit(generator)
    async with following(generator, call_id) as reader:
        end = await reader.end()
    record = (
        await generator.client.get(f"{generator.url}/v1/calls/{call_id}", headers=AUTHORIZED)
    ).json()

    assert reader.items == [("1-1", "0"), ("1-2", problem.decode())]
    assert (end["finish_reason"], end["state"]) == ("error", "FAILED")
    assert (record["status"], record["outcome"], record["is_dead"]) == (500, "raised", True)


async def test_more_than_a_result_may_have_is_an_error_and_a_finish_of_its_own(
    generator: Edge, worker: Released
) -> None:
    call_id = await submit(generator)
    async with following(generator, call_id) as reader:
        worker.put(b'"%s"\n' % (b"x" * 60_000))
        await reader.next()
        worker.put(b'"%s"\n' % (b"y" * 60_000), None)
        end = await reader.end()
    error = dict(reader.others)["error"]

    assert (error["status"], error["limit_bytes"]) == (413, 100_000)
    assert (end["finish_reason"], end["state"]) == ("length", "FAILED")
    assert len(reader.items) == 1


async def test_a_cancelled_call_says_so_to_its_readers(generator: Edge, worker: Released) -> None:
    call_id = await submit(generator)
    async with following(generator, call_id) as reader:
        worker.put(b"0\n")
        await reader.until("0")
        await generator.client.post(
            f"{generator.url}/v1/calls/{call_id}:cancel", headers=AUTHORIZED
        )
        end = await reader.end()

    assert (end["finish_reason"], end["state"]) == ("cancelled", "CANCELLED")
    assert sum(w.cancelled for w in generator.fleet.workers.values()) == 1
    (record,) = (await generator.settle()).values()
    assert (record.outcome, record.finish) == ("cancelled", "cancelled")


async def test_a_call_over_its_clock_in_the_middle_says_that_it_was_late(
    edge: Edge, worker: Released, controller: FakeController
) -> None:
    # its first item is part of it
    edge.add(route_of(spec_of(methods=GENERATOR, clocks=Clocks(execution_s=1.0))))
    call_id = await submit(edge)
    worker.put(b"0\n")
    async with following(edge, call_id) as reader:
        end = await reader.end()

    assert (dict(reader.others)["error"]["status"], end["finish_reason"]) == (504, "error")


@pytest.mark.parametrize("every_s", [OFTEN_S])
async def test_silence_is_filled_with_heartbeats(generator: Edge, worker: Released) -> None:
    call_id = await submit(generator)
    async with following(generator, call_id) as reader:
        await reader.until(":")
        worker.put(b"0\n", None)
        await reader.end()

    assert reader.comments >= 1


async def test_a_reader_who_leaves_leaves_the_call_alone(generator: Edge, worker: Released) -> None:
    call_id = await submit(generator)
    async with following(generator, call_id) as reader:
        worker.put(b"0\n")
        await reader.until("0")
    worker.put(b"1\n", None)
    async with following(generator, call_id) as other:
        assert (await other.end())["state"] == "SUCCEEDED"


async def test_a_call_that_returns_a_value_streams_its_result(
    edge: Edge, controller: FakeController
) -> None:
    async def value(request: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(body=b"7")

    edge.fleet.behaviour = value
    edge.add(route_of(spec_of(methods=(MethodSpec(),))))
    call_id = await submit(edge)
    async with following(edge, call_id) as reader:
        end = await reader.end()

    name, record = reader.others[-2]
    assert (name, record["result"], end["finish_reason"]) == ("result", 7, "stop")


@pytest.mark.parametrize("given", ["17", "1-", "a-b", "1-2-3", "99999999999-1"])
async def test_an_id_that_is_no_place_in_the_stream_is_refused(generator: Edge, given: str) -> None:
    call_id = await submit(generator)
    headers = {**AUTHORIZED, "last-event-id": given}
    answer = await generator.client.get(
        f"{generator.url}/v1/calls/{call_id}/stream", headers=headers
    )

    assert (answer.status_code, answer.json()["parameter"]) == (400, "last-event-id")


async def test_another_tenants_stream_does_not_exist(generator: Edge) -> None:
    generator.add_key("pl_other", tenant="t-000000000002")
    call_id = await submit(generator)
    answer = await generator.client.get(
        f"{generator.url}/v1/calls/{call_id}/stream", headers={"authorization": "Bearer pl_other"}
    )

    assert answer.status_code == 404


async def test_a_stream_survives_the_end_of_its_activator_as_its_next_attempt(
    short_tmp: Path,
) -> None:
    """The items of the attempt that was cut off are gone with it; the next activator's attempt is
    read by the same call id."""
    controller = await FakeController(short_tmp / "controller.sock").start()
    settings, ids = ActivatorSettings(), []
    lives: list[list[bytes | None]] = [[b"0\n"], [b"0\n", b"1\n", None]]
    for life, pieces in enumerate(lives):
        worker = Released()
        worker.put(*pieces)
        edge = Edge(short_tmp, settings, worker)
        edge.add(route_of(spec_of(methods=GENERATOR)))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(edge.books.run()), *edge.calls.start(group)]
            if life == 0:
                caller = edge.table.authenticate(f"Bearer {KEY}".encode(), 0.0)
                call = call_of(target_of(spec_of(methods=GENERATOR)), key_id=caller.key_id)
                await edge.calls.accept(caller, call, fingerprint="")
                held = edge.calls.pending.get("req-1")
                assert held is not None
                await until(lambda: held.log is not None and held.log.data == b"0\n")  # noqa: B023
                ids.append(held.log.attempt)  # type: ignore[union-attr]
            else:
                await until(lambda: controller.calls.get("req-1", {}).get("state") == "SUCCEEDED")
            for task in tasks:
                task.cancel()
        for close in (
            edge.calls.aclose,
            edge.scaler.aclose,
            edge.books.aclose,
            edge.client.aclose,
            edge.control.aclose,
            edge.fleet.aclose,
        ):
            await close()
    await controller.aclose()
    record = controller.calls["req-1"]

    assert (ids, record["attempt"], base64.b64decode(record["result"])) == ([1], 2, b"0\n1\n")
