"""Submitted calls: durable before their 202, and found again whatever dies."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from activator.async_calls.public_record import public_record
from activator.async_calls.runner import AsyncCallRunner
from activator.http.request import MAX_ACCEPT_BYTES
from activator.settings import ActivatorSettings
from pilotlight.protocol import CallRecord
from snapshotter import errors as agent_errors
from tests.activator.conftest import KEY, Edge
from tests.activator.test_gateway import forever, until
from tests.fakes.calls import call_of
from tests.fakes.fake_controller import FakeController
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest, echo
from tests.fakes.routes import route_of, spec_of, target_of


async def get(edge: Edge, path: str, key: str = KEY) -> httpx.Response:
    return await edge.client.get(
        f"{edge.url}/v1/calls/{path}", headers={"authorization": f"Bearer {key}"}
    )


async def finished(edge: Edge, call_id: str) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while True:
            body: dict[str, Any] = (await get(edge, call_id)).json()
            if body["state"] not in ("QUEUED", "RUNNING"):
                return body


async def test_a_submitted_call_is_accepted_run_and_its_result_is_found(
    edge: Edge, controller: FakeController, shipping: object
) -> None:
    edge.add(route_of(spec_of()))
    accepted = await edge.call("shop/hello:submit", json={"x": 1})
    record = await finished(edge, accepted.json()["id"])

    assert (accepted.status_code, accepted.headers["location"]) == (
        202,
        f"/v1/calls/{accepted.json()['id']}",
    )
    assert (record["state"], record["result"]) == ("SUCCEEDED", {"x": 1})
    assert record["result_encoding"] == "json"
    assert (record["content_type"], record["outcome"], record["start_kind"]) == (
        "application/json",
        "ok",
        "COLD",
    )
    assert [r.call for r in (await edge.settle()).values()] == [record["id"]]


async def test_an_error_of_the_activator_ends_a_call(
    edge: Edge, shipping: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object) -> None:
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr(AsyncCallRunner, "run", broken)
    edge.add(route_of(spec_of()))
    accepted = await edge.call("shop/hello:submit", json={"x": 1})
    record = await finished(edge, accepted.json()["id"])

    assert (record["state"], record["outcome"], record["status"]) == ("FAILED", "error", 500)
    assert "see its log" in str(record["result"])
    assert "RecursionError" in caplog.text


@pytest.mark.parametrize(
    "content_type, body, encoding",
    [
        pytest.param("application/json; charset=utf-8", b' {"n": 1.50}\r\n', "json", id="JSON"),
        pytest.param("application/json", b"null", "json", id="null"),
        pytest.param("application/problem+json", b'{"status": 500}', "json", id="problem"),
        pytest.param("application/x-ndjson", b'1\n{"a": "\xc3\xa4"}\n\n[2]\n', "json", id="lines"),
        pytest.param("application/json", b'{"n": NaN}', "base64", id="NaN"),
        pytest.param("application/json", b'1, "state": "FAILED"', "base64", id="not JSON"),
        pytest.param("application/x-ndjson", b"1,2\n3\n", "base64", id="lines that are not JSON"),
        pytest.param("application/json", '{"a": 1}'.encode("utf-16"), "base64", id="UTF-16"),
        pytest.param("application/json", b"[" * 15_000 + b"]" * 15_000, "base64", id="deep"),
        pytest.param("application/json", b"[0" + b",0" * 20_000 + b"]", "base64", id="many values"),
        pytest.param("image/png", b"\x89PNG", "base64", id="binary"),
        pytest.param("", b"", None, id="none yet"),
    ],
)
def test_a_result_is_json_or_says_its_encoding(
    content_type: str, body: bytes, encoding: str | None
) -> None:
    kept = CallRecord(
        id="req-1",
        tenant="t",
        environment="main",
        app="shop",
        function="hello",
        method="",
        state="SUCCEEDED",
        sequence=1,
        submitted_at=1.0,
        content_type=content_type,
        result=base64.b64encode(body).decode(),
    )
    shown = json.loads(public_record({**kept.to_json(), "attempts": []}))
    assert (shown["result_encoding"], shown["state"]) == (encoding, "SUCCEEDED")
    read = base64.b64decode(CallRecord.from_json(shown).result)
    if encoding != "json":
        assert read == body
        return
    lines = [json.loads(line) for line in body.splitlines() if line.strip()]
    assert [json.loads(line) for line in read.splitlines()] == lines
    assert shown["result"] == (lines if "ndjson" in content_type else lines[0])


async def test_a_result_the_controller_has_is_forgotten_here_and_still_found(
    edge: Edge, controller: FakeController, shipping: object
) -> None:
    edge.add(route_of(spec_of()))
    call_id = (await edge.call("shop/hello:submit", json={"x": 1})).json()["id"]
    await until(lambda: controller.calls.get(call_id, {}).get("state") == "SUCCEEDED")
    await until(lambda: not edge.calls.pending)

    assert (await get(edge, call_id)).json()["state"] == "SUCCEEDED"
    assert edge.books.journal.statistics().held_calls == 0


async def test_bad_arguments_are_refused_before_a_202(edge: Edge) -> None:
    edge.add(route_of(spec_of()))

    assert (await edge.call("shop/hello:submit", json={"x": "one"})).status_code == 400
    assert edge.books.journal.statistics().held_calls == 0


@pytest.mark.parametrize("verb", ["invoke", "submit"])
async def test_an_accept_header_over_its_bound_is_refused_and_nothing_of_it_is_kept(
    edge: Edge, verb: str
) -> None:
    edge.add(route_of(spec_of()))
    assert (await edge.call(json={"x": 1})).status_code == 200
    answer = await edge.call(
        f"shop/hello:{verb}", json={"x": 1}, headers={"accept": "x" * (MAX_ACCEPT_BYTES + 1)}
    )

    assert (answer.status_code, answer.json()["parameter"]) == (400, "accept")
    assert not edge.calls.pending.bytes_of
    assert (
        await edge.call(json={"x": 1}, headers={"accept": "x" * MAX_ACCEPT_BYTES})
    ).status_code == 200


async def test_another_tenants_call_does_not_exist(edge: Edge, controller: FakeController) -> None:
    edge.add(route_of(spec_of()))
    edge.add_key("pl_other", tenant="t-000000000002")
    edge.fleet.gate.clear()
    call_id = (await edge.call("shop/hello:submit", json={"x": 1})).json()["id"]

    assert (await get(edge, call_id)).status_code == 200
    assert (await get(edge, call_id, key="pl_other")).status_code == 404


async def test_a_repeated_put_is_the_same_call_and_other_arguments_are_a_conflict(
    edge: Edge, controller: FakeController
) -> None:
    edge.add(route_of(spec_of()))

    async def put(body: dict[str, int]) -> httpx.Response:
        url = f"{edge.url}/v1/calls/order-7?function=shop/hello"
        return await edge.client.put(url, json=body, headers={"authorization": f"Bearer {KEY}"})

    first, again, other = await put({"x": 1}), await put({"x": 1}), await put({"x": 2})

    assert (first.status_code, again.status_code, other.status_code) == (202, 200, 409)
    assert (await finished(edge, "order-7"))["state"] == "SUCCEEDED"
    assert sum(len(w.requests) for w in edge.fleet.workers.values()) == 1


async def test_the_same_put_many_times_at_once_is_one_call(
    edge: Edge, controller: FakeController
) -> None:
    edge.add(route_of(spec_of()))
    url, headers = (
        f"{edge.url}/v1/calls/order-1?function=shop/hello",
        {"authorization": f"Bearer {KEY}"},
    )
    answers = await asyncio.gather(
        *(edge.client.put(url, json={"x": 1}, headers=headers) for _ in range(8))
    )

    assert sorted(a.status_code for a in answers) == [200] * 7 + [202]
    assert (await finished(edge, "order-1"))["state"] == "SUCCEEDED"
    assert len(await edge.settle()) == 1


async def test_a_key_of_one_environment_sees_no_call_of_another(
    edge: Edge, controller: FakeController
) -> None:
    edge.add(route_of(spec_of()))
    edge.add_key("pl_staging", environment="staging")
    accepted = (await edge.call("shop/hello:submit", json={"x": 1})).json()["id"]

    cancel = await edge.client.post(
        f"{edge.url}/v1/calls/{accepted}:cancel", headers={"authorization": "Bearer pl_staging"}
    )
    assert cancel.status_code == 404


async def test_a_cancelled_call_stops_and_says_so(edge: Edge, controller: FakeController) -> None:
    edge.fleet.behaviour = forever
    edge.add(route_of(spec_of()))
    call_id = (await edge.call("shop/hello:submit", json={"x": 1})).json()["id"]
    await until(lambda: any(w.requests for w in edge.fleet.workers.values()))
    answer = await edge.client.post(
        f"{edge.url}/v1/calls/{call_id}:cancel", headers={"authorization": f"Bearer {KEY}"}
    )

    assert answer.json()["state"] == "CANCELLED"
    await until(lambda: sum(w.cancelled for w in edge.fleet.workers.values()) == 1)


async def test_cancelling_a_call_that_has_ended_says_how(
    edge: Edge, controller: FakeController, shipping: object
) -> None:
    edge.add(route_of(spec_of()))
    call_id = (await edge.call("shop/hello:submit", json={"x": 1})).json()["id"]
    own_id = "order-9"
    await edge.client.put(
        f"{edge.url}/v1/calls/{own_id}?function=shop/hello",
        json={"x": 1},
        headers={"authorization": f"Bearer {KEY}"},
    )

    async def cancel(call: str) -> httpx.Response:
        return await edge.client.post(
            f"{edge.url}/v1/calls/{call}:cancel", headers={"authorization": f"Bearer {KEY}"}
        )

    for call in (call_id, own_id):
        await finished(edge, call)
        at_once = await cancel(call)
        await until(lambda: not list(edge.calls.pending))
        shipped = await cancel(call)
        assert at_once.status_code == shipped.status_code == 200, shipped.text
        assert shipped.json() == at_once.json()
        assert shipped.json()["state"] == "SUCCEEDED"
        assert (shipped.json()["status"], shipped.json()["outcome"]) == (200, "ok")
    assert (await cancel("req-unknown")).status_code == 404


async def test_a_stream_of_a_call_tells_each_state_and_ends_with_the_result(
    edge: Edge, controller: FakeController
) -> None:
    edge.add(route_of(spec_of()))
    edge.fleet.gate.clear()
    call_id = (await edge.call("shop/hello:submit", json={"x": 1})).json()["id"]
    url, headers = f"{edge.url}/v1/calls/{call_id}/stream", {"authorization": f"Bearer {KEY}"}
    async with edge.client.stream("GET", url, headers=headers) as answer:
        pieces = answer.aiter_text()
        text = await anext(pieces)  # it is followed before it runs
        edge.fleet.gate.set()
        text += "".join([piece async for piece in pieces])
    events = [part.split("\n")[0] for part in text.strip().split("\n\n")]

    assert events[0] == "event: state"
    assert events[-2:] == ["event: result", "event: end"]


@pytest.mark.parametrize("body", [b"[" * 100_000, b"{torn"], ids=["deep", "torn"])
async def test_an_error_that_says_it_is_json_and_is_not_ends_the_stream_of_its_call(
    edge: Edge, controller: FakeController, body: bytes
) -> None:
    async def lies(_: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(status=500, body=body, content_type="application/problem+json")

    edge.fleet.behaviour = lies
    edge.add(route_of(spec_of()))
    call_id = (await edge.call("shop/hello:submit", json={"x": 1})).json()["id"]
    assert (await finished(edge, call_id))["state"] == "FAILED"
    answer = await get(edge, f"{call_id}/stream")
    assert answer.status_code == 200
    events = [part.split("\n")[0] for part in answer.text.strip().split("\n\n")]
    assert events[-2:] == ["event: error", "event: end"]


async def test_a_submitted_call_waits_out_a_lack_of_capacity(
    edge: Edge, controller: FakeController
) -> None:
    edge.add(route_of(spec_of()))
    edge.fleet.failures = [agent_errors.NoCapacity("memory")]
    call_id = (await edge.call("shop/hello:submit", json={"x": 1})).json()["id"]

    assert (await finished(edge, call_id))["state"] == "SUCCEEDED"


async def test_a_poll_may_wait_for_the_end(edge: Edge, controller: FakeController) -> None:
    edge.add(route_of(spec_of()))
    edge.fleet.gate.clear()
    call_id = (await edge.call("shop/hello:submit", json={"x": 1})).json()["id"]
    short = (await get(edge, f"{call_id}?wait_s=0.01")).json()
    waiting = asyncio.create_task(get(edge, f"{call_id}?wait_s=20"))
    await asyncio.sleep(0.02)
    edge.fleet.gate.set()

    assert short["state"] != "SUCCEEDED"
    assert (await waiting).json()["state"] == "SUCCEEDED"
    assert (await get(edge, f"{call_id}?wait_s=never")).status_code == 400


async def test_more_submitted_calls_than_the_queue_holds_are_all_run(
    edge: Edge, controller: FakeController
) -> None:
    from pilotlight.spec.instances.scaling import Scaling

    edge.add(route_of(spec_of(scaling=Scaling(max_inputs=1, max_instances=2, max_queued=1))))
    ids = [(await edge.call("shop/hello:submit", json={"x": n})).json()["id"] for n in range(20)]

    assert {(await finished(edge, call_id))["state"] for call_id in ids} == {"SUCCEEDED"}


async def test_what_a_dead_activator_had_accepted_is_run_by_the_next_one(short_tmp: Path) -> None:
    settings = ActivatorSettings()
    first = Edge(short_tmp, settings, forever)
    first.add(route_of(spec_of()))
    tasks = [asyncio.create_task(first.books.run())]
    caller = first.table.authenticate(f"Bearer {KEY}".encode(), 0.0)
    call = call_of(target_of(spec_of()), b'{"x":5}', key_id=caller.key_id)
    await first.calls.accept(caller, call, fingerprint="")
    await until(lambda: any(w.requests for w in first.fleet.workers.values()))
    # what the end of the process does to its tasks; the journal is all that is left
    await first.calls.aclose()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await first.scaler.aclose()
    await first.books.aclose()
    await first.client.aclose()
    await first.control.aclose()
    await first.fleet.aclose()

    controller = await FakeController(short_tmp / "controller.sock").start()
    second = Edge(short_tmp, settings, echo)
    second.add(route_of(spec_of()))
    second.tell("key", f"k-{KEY}", None)  # revoked meanwhile
    async with asyncio.TaskGroup() as group:
        books = group.create_task(second.books.run())
        (shipping,) = second.calls.start(group)
        await until(lambda: controller.calls.get("req-1", {}).get("state") == "SUCCEEDED")
        for task in (books, shipping):
            task.cancel()
    await second.calls.aclose()
    await second.scaler.aclose()
    await second.books.aclose()
    await second.client.aclose()
    await second.control.aclose()
    await second.fleet.aclose()
    await controller.aclose()

    assert second.quotas.statistics().subjects == 0, "no quota of callers without a key applies"
    assert base64.b64decode(controller.calls["req-1"]["result"]) == b'{"x":5}'
