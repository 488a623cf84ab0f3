"""A warm-up over HTTP: its stages as they come, the report last, and a caller who leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, MutableMapping
from typing import Any

from activator.gateway import warmup_stream
from activator.http.request import Request
from snapshotter import errors
from tests.activator.conftest import Edge
from tests.activator.test_gateway import until
from tests.fakes.routes import TENANT, route_of, spec_of

NDJSON = {"accept": "application/x-ndjson"}


async def test_stages_are_told_and_the_report_is_last(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    answer = await edge.call("shop/hello:warmup", headers=NDJSON)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson")
    *stages, last = [json.loads(line) for line in answer.text.splitlines()]
    assert {s["stage"] for s in stages} <= {"start", "template", "instance", "snapshot"}
    assert stages, "a stage that is over at once may be left out, but not all of them"
    assert last["report"]["snapshot"]["id"] == "sn-0123456789abcdef"


async def test_without_that_accept_it_is_one_document(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    assert (await edge.call("shop/hello:warmup")).json()["snapshot"]["state"] == "READY"
    assert "snapshot" not in (await edge.call("shop/hello:warmup?snapshot=false")).json()


async def test_a_warm_up_costs_a_request_of_the_quota(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    edge.add_tenant("acme", requests_per_s=0.001, burst=2, concurrent=0)
    answers = [
        await edge.call("shop/hello:warmup", headers=NDJSON),
        *[await edge.call("shop/hello:warmup") for _ in range(2)],
    ]

    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert edge.quotas.held(f"tenant:{TENANT}") == 0


async def test_nothing_is_warmed_up_on_a_budget_that_is_spent(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    budget = {
        "tenant": TENANT,
        "environment": "",
        "app": "",
        "function": "",
        "currency": "USD",
        "hard": True,
        "period": "day",
    }
    edge.tell("budget", "b-1", {**budget, "id": "b-1", "amount": "0.000000000001"})

    assert (await edge.call("shop/hello:warmup")).status_code == 402
    assert not edge.fleet.started


async def test_a_start_that_fails_is_the_last_line(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    edge.fleet.failures.append(errors.StartFailed("no module named x", {"log_tail": ["…"]}))
    last = json.loads((await edge.call("shop/hello:warmup", headers=NDJSON)).text.splitlines()[-1])
    assert (last["error"]["status"], last["error"]["log_tail"]) == (502, ["…"])


async def test_a_stage_that_lasts_is_told_again() -> None:
    sent: list[dict[str, object]] = []
    finish = asyncio.Event()

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            sent.append(json.loads(message["body"]))
            if len(sent) == 4:
                finish.set()

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def work(stage: Callable[[str], None]) -> dict[str, str]:
        stage("snapshot")
        await finish.wait()
        return {"revision": "v1"}

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "raw_path": b"/",
        "query_string": b"",
        "headers": [],
        "client": ("::1", 1),
    }
    await warmup_stream.stream(Request(scope, receive, send), work, heartbeat_s=0.002)
    assert [line.get("stage") for line in sent] == ["snapshot"] * 4 + [None]
    assert sent[-1] == {"report": {"revision": "v1"}}


async def test_a_caller_who_leaves_ends_the_waiting(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    edge.fleet.checkpoint_gate.clear()
    asked = asyncio.create_task(edge.call("shop/hello:warmup", headers=NDJSON))
    await until(lambda: _warm_ups() == 1)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await until(lambda: _warm_ups() == 0)


def _warm_ups() -> int:
    return sum(task.get_name().startswith("warm-up ") for task in asyncio.all_tasks())


async def test_a_restored_call_says_so_to_its_caller_on_its_bill_and_in_the_metrics(
    edge: Edge,
) -> None:
    edge.add(route_of(spec_of()))
    target = edge.table.targets_of(f"{TENANT}/main/shop/hello")[0]
    await edge.fleet.checkpoint(target)

    answer = await edge.call(json={"x": 1})

    assert answer.headers["pilotlight-start"] == "RESTORE"
    assert "start;dur=" in answer.headers["server-timing"]
    (record,) = (await edge.settle()).values()
    assert (record.start_kind, record.kind) == ("RESTORE", "CALL")
    labels = {"tenant": TENANT, "app": "shop", "function": "hello", "start_kind": "RESTORE"}
    assert edge.metrics.registry.get_sample_value("pilotlight_cold_calls_total", labels) == 1
    phase = {"start_kind": "RESTORE", "phase": "restore"}
    counted = edge.metrics.registry.get_sample_value("pilotlight_start_phase_seconds_total", phase)
    assert counted is not None
    assert 0 < counted <= 0.001, "what the fleet says, and no more than the whole start took"
