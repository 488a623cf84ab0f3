"""Lists of submitted calls, dead letters, schedules by hand, and due calls, as HTTP."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest
import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from pilotlight.protocol import CALLS_PATH, DUE_PATH, CallRecord
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import refused, spec


async def ship(
    controller: Controller,
    call: str = "req-1",
    *,
    payload: dict[str, Any] | None = None,
    **changes: Any,
) -> CallRecord:
    """An activator reports a call."""
    values: dict[str, Any] = {
        "id": call,
        "tenant": await controller.tenant(),
        "environment": "main",
        "app": "search",
        "function": "embed",
        "method": "",
        "state": "FAILED",
        "sequence": 5,
        "submitted_at": controller.clock.now,
        "expires_at": controller.clock.now + 600,
        "attempt": 4,
        "status": 500,
        "result": "c2VjcmV0",
    }
    record = CallRecord(**{**values, **changes})
    extra = {} if payload is None else {"payload": payload}
    assert (
        await controller.internal(CALLS_PATH, {"calls": [{**record.to_json(), **extra}]})
    ).status_code == 200
    return record


async def bury(controller: Controller, call: str = "req-1", **changes: Any) -> None:
    """A call that failed after its last attempt."""
    held = {
        "owner": await controller.tenant(),
        "key": "k-1",
        "content_type": "application/json",
        "accept": "",
        "body": "e30=",
    }
    record = await ship(controller, call, is_dead=True, payload=held, **changes)
    assert record.is_dead


async def calls(controller: Controller, **params: Any) -> list[str]:
    answer = await controller.http.get("/v1/calls", params=params)
    assert answer.status_code == 200, answer.text
    return [call["id"] for call in answer.json()["calls"]]


async def ask(
    controller: Controller, activator: str = "a-0", wait_s: float = 0
) -> list[dict[str, Any]]:
    headers = {HEADER_PLATFORM_TOKEN: controller.context.key.token}
    answer = await controller.http.get(
        DUE_PATH, params={"activator": activator, "wait_s": wait_s}, headers=headers
    )
    return list(answer.json()["calls"])


async def take(controller: Controller, *ids: str, activator: str = "a-0") -> list[str]:
    return list(
        (await controller.internal(DUE_PATH, {"activator": activator, "ids": list(ids)})).json()[
            "yours"
        ]
    )


@pytest.fixture(name="scheduled")
async def _scheduled(controller: Controller) -> Controller:
    """A controller with `search/hello`, which has one schedule."""
    body = {"functions": [spec(schedules=[{"cron": "0 6 * * *", "timezone": "Europe/Berlin"}])]}
    assert (await controller.http.post("/v1/apps/search/deploy", json=body)).status_code == 200
    return controller


async def test_calls_are_listed_newest_first_without_results_and_dead_ones_apart(
    controller: Controller,
) -> None:
    await ship(controller, "req-1", state="SUCCEEDED")
    controller.clock.now += 1
    await ship(controller, "req-2", app="other", schedule="f-1/0")
    controller.clock.now += 1
    await bury(controller, "req-3")
    assert await calls(controller) == ["req-3", "req-2", "req-1"]
    assert await calls(controller, state="DEAD") == ["req-3"]
    assert await calls(controller, state="FAILED") == ["req-3", "req-2"]
    assert await calls(controller, app="search", function="embed", limit=1) == ["req-3"]
    assert await calls(controller, schedule="f-1/0") == ["req-2"]
    assert await calls(controller, before=controller.clock.now) == ["req-2", "req-1"]
    assert "c2VjcmV0" not in (await controller.http.get("/v1/calls")).text


async def test_a_list_of_calls_reads_no_results(controller: Controller) -> None:
    await ship(controller, state="SUCCEEDED", result="QUJD" * 1000)
    with controller.context.store.read() as sql:
        assert "QUJD" not in sql.execute(sa.select(tables.calls.c.record)).scalar_one()
    assert "result" not in (await controller.http.get("/v1/calls")).json()["calls"][0]
    assert (await controller.http.get("/v1/calls/req-1")).json()["result"] == "QUJD" * 1000


async def test_a_dead_letter_is_sent_again_under_its_id_with_its_attempts_counting_on(
    controller: Controller,
) -> None:
    await bury(controller)
    answer = await controller.http.post("/v1/calls/req-1:redrive")
    assert (answer.status_code, answer.json()) == (202, {"calls": ["req-1"], "more": False})
    (held,) = await ask(controller)
    assert {
        key: held["record"][key]
        for key in ("id", "state", "sequence", "attempt", "is_dead", "result")
    } == {
        "id": "req-1",
        "state": "QUEUED",
        "sequence": 6,
        "attempt": 4,
        "is_dead": False,
        "result": "",
    }
    assert (held["key"], held["body"]) == ("k-1", "e30=")
    assert (await controller.http.get("/v1/calls/req-1")).json()["state"] == "QUEUED"
    refused(await controller.http.post("/v1/calls/req-1:redrive"), 409)


async def test_a_dead_letter_that_dies_again_can_be_sent_again(controller: Controller) -> None:
    await bury(controller)
    await controller.http.post("/v1/calls/req-1:redrive")
    (first,) = await ask(controller)
    assert await take(controller, first["due"]) == [first["due"]]
    await bury(controller, sequence=9, attempt=8)
    await controller.http.post("/v1/calls/req-1:redrive")
    (second,) = await ask(controller)
    assert (second["due"], second["record"]["attempt"]) == ("req-1/10", 8)


async def test_dead_letters_are_sent_again_together_as_far_as_was_asked(
    controller: Controller,
) -> None:
    for number, app in enumerate(("search", "search", "other")):
        controller.clock.now += 1
        await bury(controller, f"req-{number}", app=app)
    some = await controller.http.post("/v1/calls:redrive", json={"app": "search", "limit": 1})
    assert some.json() == {"calls": ["req-0"], "more": True}
    assert (await controller.http.post("/v1/calls:redrive", json={})).json() == {
        "calls": ["req-1", "req-2"],
        "more": False,
    }


async def test_calls_of_others_do_not_exist_and_keys_reach_only_what_is_theirs(
    controller: Controller,
) -> None:
    await bury(controller)
    async with controller.client(await controller.other_tenant()) as http:
        assert (await http.get("/v1/calls")).json() == {"calls": []}
        assert (await http.post("/v1/calls/req-1:redrive")).status_code == 404
        assert (await http.post("/v1/calls:redrive", json={})).json()["calls"] == []
    bound = await controller.new_key(scope="deploy", environment="main", app="other")
    async with controller.client(bound) as http:
        assert (await http.get("/v1/calls")).json() == {"calls": []}
        assert (await http.post("/v1/calls/req-1:redrive")).status_code == 409
        assert (await http.post("/v1/calls:redrive", json={})).json()["calls"] == []
    async with controller.client(await controller.new_key(scope="invoke")) as http:
        assert (await http.post("/v1/calls:redrive", json={})).status_code == 403


async def test_a_schedule_is_listed_paused_resumed_and_run_at_once(scheduled: Controller) -> None:
    (listed,) = (await scheduled.http.get("/v1/schedules")).json()["schedules"]
    assert {
        key: listed[key] for key in ("app", "function", "number", "cron", "timezone", "is_paused")
    } == {
        "app": "search",
        "function": "hello",
        "number": 0,
        "cron": "0 6 * * *",
        "timezone": "Europe/Berlin",
        "is_paused": False,
    }
    paused = (await scheduled.http.post("/v1/schedules/search/hello/0:pause")).json()
    assert (paused["is_paused"], paused["next_at"]) == (True, None)
    assert (await scheduled.http.post("/v1/schedules/search/hello/0:resume")).json()[
        "next_at"
    ] == listed["next_at"]
    begun = await scheduled.http.post("/v1/schedules/search/hello/0:run")
    assert (begun.status_code, begun.headers["location"]) == (202, begun.json()["url"])
    (held,) = await ask(scheduled)
    assert (held["record"]["id"], held["record"]["schedule"]) == (begun.json()["id"], listed["id"])


async def test_two_runs_at_once_are_two_calls_and_one_repeated_under_a_key_is_one(
    scheduled: Controller,
) -> None:
    for headers in ({}, {}, {"idempotency-key": "x"}, {"idempotency-key": "x"}):
        assert (
            await scheduled.http.post("/v1/schedules/search/hello/0:run", headers=headers)
        ).status_code == 202
    assert len(await ask(scheduled)) == 3


async def test_schedules_of_others_and_of_stopped_apps(scheduled: Controller) -> None:
    async with scheduled.client(await scheduled.other_tenant()) as http:
        assert (await http.post("/v1/schedules/search/hello/0:run")).status_code == 404
    async with scheduled.client(
        await scheduled.new_key(scope="deploy", environment="main", app="other")
    ) as http:
        assert (await http.get("/v1/schedules")).json() == {"schedules": []}
        assert (await http.post("/v1/schedules/search/hello/0:pause")).status_code == 403
    assert (await scheduled.http.post("/v1/schedules/search/hello/7:run")).status_code == 404
    await scheduled.http.post("/v1/apps/search:stop")
    assert "stopped" in refused(await scheduled.http.post("/v1/schedules/search/hello/0:run"), 409)
    assert (await scheduled.http.post("/v1/schedules/search/hello/0:resume")).json()[
        "next_at"
    ] is None


async def test_a_deploy_with_a_schedule_that_cannot_be_is_refused(controller: Controller) -> None:
    body = {"functions": [spec(schedules=[{"cron": "0 6 * * *", "timezone": "Mars/Olympus"}])]}
    assert "time zone" in refused(
        await controller.http.post("/v1/apps/search/deploy", json=body), 400
    )


async def test_an_activator_that_waits_is_given_what_becomes_due(scheduled: Controller) -> None:
    waiting = asyncio.create_task(ask(scheduled, wait_s=60))
    while not scheduled.context.notifier._event._waiters:
        await asyncio.sleep(0.01)
    await scheduled.http.post("/v1/schedules/search/hello/0:run")
    async with asyncio.timeout(30):
        (held,) = await waiting
    assert base64.b64decode(held["body"]) == b"{}"


async def test_due_calls_are_for_the_platforms_own_processes(controller: Controller) -> None:
    assert (await controller.http.get(DUE_PATH, params={"activator": "a-0"})).status_code == 403
    assert (
        await controller.http.post(DUE_PATH, json={"activator": "a-0", "ids": []})
    ).status_code == 403


async def test_calls_of_an_activator_that_is_gone_are_run_by_another_once(
    controller: Controller,
) -> None:
    record = await ship(controller, "req-1", state="RUNNING", attempt=2)
    held = {
        "record": {**record.to_json(), "sequence": 1},
        "owner": record.tenant,
        "key": "k-1",
        "content_type": "x",
        "accept": "",
        "body": "",
    }
    body, headers = (
        {"activator": "a-7", "calls": [held]},
        {HEADER_PLATFORM_TOKEN: controller.context.key.token},
    )

    for accepted in (1, 0):
        answer = await controller.http.put(DUE_PATH, json=body, headers=headers)
        assert (answer.status_code, answer.json()) == (200, {"accepted": accepted})

    (given,) = await ask(controller, "a-0")
    assert (given["record"]["state"], given["record"]["attempt"], given["record"]["sequence"]) == (
        "QUEUED",
        2,
        6,
    )
    assert await take(controller, given["due"], activator="a-0") == [given["due"]]
    assert await ask(controller, "a-1") == []
    assert (await controller.http.put(DUE_PATH, json=body)).status_code == 403
