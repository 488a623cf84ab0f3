"""Requests to sandboxes at the edge: which instance answers, for whom, and what follows its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from activator.async_calls.records import is_dead
from activator.async_calls.sandboxes import methods_of
from activator.coordination.peers import PASSED_ON
from activator.settings import ActivatorSettings
from pilotlight.errors import NotFound
from pilotlight.protocol import CONTENT_PICKLE, CallRecord
from pilotlight.spec.function import FunctionSpec, MethodSpec
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.sandboxes import (
    ARGUMENTS,
    ENTRY,
    LABEL,
    MAX_ANSWER_BYTES,
    MAX_BODY_BYTES,
    QUEUE_S,
    SLACK_S,
)
from tests.activator.conftest import KEY, Edge
from tests.activator.test_gateway import until
from tests.fakes.calls import call_of
from tests.fakes.fake_controller import FakeController
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.routes import TENANT, route_of, target_of

OTHERS_KEY = "pl_other"


def sandbox_spec(**more: Any) -> FunctionSpec:
    module, qualname = ENTRY
    return FunctionSpec(
        name="sandbox-1",
        module=module,
        qualname=qualname,
        bundle="b" * 64,
        methods=(MethodSpec(schema=ARGUMENTS, parameters=tuple(ARGUMENTS["properties"])),),
        scaling=Scaling(max_instances=4),
        sandbox=True,
        **more,
    )


async def worker(request: WorkerRequest) -> WorkerAnswer:
    """Its call lasts; a request to the sandbox is answered with itself."""
    if request.path.startswith("/invoke/"):
        await asyncio.Event().wait()
    body = f"{request.method} {request.path} {request.body.decode()}"
    return WorkerAnswer(body=body.encode(), content_type="text/html")


@pytest.fixture(name="serving")
def _serving(edge: Edge) -> Edge:
    edge.fleet.behaviour = worker
    edge.add(route_of(sandbox_spec()))
    return edge


async def create(edge: Edge) -> str:
    answer = await edge.call("shop/sandbox-1:submit", json={"timeout_s": 60})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


async def ask(
    edge: Edge, sandbox: str, place: str, method: str = "GET", key: str = KEY, **more: Any
) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}", **more.pop("encoding", {})}
    url = f"{edge.url}/v1/sandboxes/{sandbox}/{place}"
    return await edge.client.request(method, url, headers=headers, **more)


async def test_a_request_goes_to_the_instance_of_its_sandbox_and_waits_for_it(
    serving: Edge,
) -> None:
    one, two = await create(serving), await create(serving)
    answers = [await ask(serving, each, "exec", "POST", content=b"{}") for each in (one, two)]
    assert [answer.text for answer in answers] == ["POST /sandbox/exec {}"] * 2
    assert {answer.headers["content-type"] for answer in answers} == {"application/octet-stream"}
    served = [
        [request.path for request in each.requests] for each in serving.fleet.workers.values()
    ]
    assert served == [["/invoke/", "/sandbox/exec"]] * 2
    assert PASSED_ON.decode() not in answers[0].headers
    headers = {"authorization": f"Bearer {KEY}", PASSED_ON.decode(): "1"}
    url = f"{serving.url}/v1/sandboxes/{one}/processes/1"
    assert PASSED_ON.decode() in (await serving.client.get(url, headers=headers)).headers
    output = await ask(serving, one, "processes/3?stdout=5&wait_s=1")
    assert output.text == "GET /sandbox/processes/3?stdout=5&wait_s=1 "


async def test_only_who_may_read_its_call_reaches_a_sandbox(
    serving: Edge, controller: FakeController
) -> None:
    serving.add_key(OTHERS_KEY, tenant="t-000000000002")
    serving.add_key("pl_bound", app="another")
    serving.add_key("pl_billing", scope="read-billing")
    sandbox = await create(serving)
    statuses = {}
    for key in (KEY, OTHERS_KEY, "pl_bound", "pl_billing", "pl_wrong"):
        statuses[key] = (await ask(serving, sandbox, "exec", "POST", key)).status_code
    assert statuses == {
        KEY: 200,
        OTHERS_KEY: 404,
        "pl_bound": 403,
        "pl_billing": 403,
        "pl_wrong": 401,
    }


async def test_one_whose_worker_does_not_end_it_is_ended_after_its_time(
    serving: Edge, controller: FakeController
) -> None:
    began = time.monotonic()
    answer = await serving.call(
        "shop/sandbox-1:submit",
        json={"timeout_s": 0.3},
        headers={"pilotlight-timeout": f"{0.3 + QUEUE_S + SLACK_S:g}"},
    )
    sandbox = str(answer.json()["id"])
    assert (await ask(serving, sandbox, "exec", "POST")).status_code == 200
    (instance,) = serving.fleet.workers
    await until(lambda: [each for each, _ in serving.fleet.stopped] == [instance])
    assert 0.3 + SLACK_S <= time.monotonic() - began < 0.3 + SLACK_S + 8
    assert (await ask(serving, sandbox, "exec", "POST")).status_code == 404


async def test_waiting_for_an_instance_takes_nothing_of_a_sandboxs_time(serving: Edge) -> None:
    serving.fleet.gate.clear()
    answer = await serving.call(
        "shop/sandbox-1:submit",
        json={"timeout_s": 0.3},
        headers={"pilotlight-timeout": f"{0.3 + QUEUE_S + SLACK_S:g}"},
    )
    sandbox = str(answer.json()["id"])
    await asyncio.sleep(0.3 + SLACK_S + 0.5)
    serving.fleet.gate.set()
    assert (await ask(serving, sandbox, "exec", "POST")).status_code == 200


async def test_an_instance_serves_one_sandbox_and_ends_with_it(
    serving: Edge, controller: FakeController
) -> None:
    sandbox = await create(serving)
    assert (await ask(serving, sandbox, "exec", "POST")).status_code == 200
    (instance,) = serving.fleet.workers
    cancelled = await serving.client.post(
        f"{serving.url}/v1/calls/{sandbox}:cancel", headers={"authorization": f"Bearer {KEY}"}
    )
    assert cancelled.json()["state"] == "CANCELLED"
    ended = await ask(serving, sandbox, "exec", "POST")
    assert (ended.status_code, "has ended" in ended.text) == (404, True)
    await until(lambda: [each for each, _ in serving.fleet.stopped] == [instance])
    again = await create(serving)
    assert (await ask(serving, again, "exec", "POST")).status_code == 200
    assert instance not in serving.fleet.workers


async def test_other_calls_are_no_sandboxes_and_sandboxes_are_not_invoked(
    serving: Edge, controller: FakeController
) -> None:
    from tests.fakes.routes import spec_of

    serving.add(route_of(spec_of("plain")))
    plain = (await serving.call("shop/plain:submit", json={"x": 1})).json()["id"]
    assert (await ask(serving, plain, "exec", "POST")).status_code == 404
    invoked = await serving.call("shop/sandbox-1:invoke", json={})
    assert (invoked.status_code, "submit its call" in invoked.text) == (400, True)


async def test_a_large_body_is_refused_before_the_worker_gets_it(serving: Edge) -> None:
    sandbox = await create(serving)
    large = await ask(serving, sandbox, "files?path=a", "PUT", content=b"x" * (MAX_BODY_BYTES + 1))
    assert large.status_code == 413


async def test_bodies_count_in_their_tenants_share_of_memory(serving: Edge) -> None:
    sandbox = await create(serving)
    assert (await ask(serving, sandbox, "exec", "POST")).status_code == 200
    (worker_of_it,) = serving.fleet.workers.values()
    goes_on = asyncio.Event()

    async def waits(request: WorkerRequest) -> WorkerAnswer:
        await goes_on.wait()
        return WorkerAnswer(body=b"{}")

    worker_of_it.behaviour = waits
    asking = asyncio.create_task(
        ask(serving, sandbox, "files?path=a", "PUT", content=b"x" * 100_000)
    )
    tenant = target_of(sandbox_spec()).tenant
    await until(lambda: serving.gateway.bodies.bytes_of[tenant] == 100_000)
    assert "" not in serving.gateway.bodies.bytes_of
    goes_on.set()
    assert (await asking).status_code == 200
    await until(lambda: not serving.gateway.bodies.bytes_of)


async def test_requests_to_sandboxes_and_polls_of_calls_have_a_rate(serving: Edge) -> None:
    sandbox = await create(serving)
    serving.add_tenant("acme", requests_per_s=0.001)  # 100 at once, and then 10 in a second
    began, poll = time.monotonic(), f"{serving.url}/v1/calls/{sandbox}"
    answers: list[httpx.Response] = []
    while all(answer.status_code == 200 for answer in answers):
        execs = (ask(serving, sandbox, "exec", "POST", content=b"{}") for _ in range(60))
        polls = (
            serving.client.get(poll, headers={"authorization": f"Bearer {KEY}"}) for _ in range(60)
        )
        answers += await asyncio.gather(*execs, *polls)
    passed = sum(answer.status_code == 200 for answer in answers)
    assert 100 <= passed <= 101 + 10 * (time.monotonic() - began)
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.headers["retry-after"] == "1"
    assert refused.headers["ratelimit-policy"] == '"operations";q=100;w=10'
    assert (refused.json()["of"], refused.json()["limit"]) == ("operations", 10)


async def test_requests_of_a_tenant_without_quotas_have_a_rate_too(serving: Edge) -> None:
    sandbox = await create(serving)
    headers = {"authorization": f"Bearer {KEY}"}
    answer = await serving.client.get(f"{serving.url}/v1/calls/{sandbox}", headers=headers)
    assert answer.headers["ratelimit-policy"] == '"operations";q=20000;w=10'
    # the controller is away, but the request was counted
    for verb, path in (("POST", "dicts/seen"), ("PUT", f"volume-chunks/{'ab' * 32}")):
        stored = await serving.client.request(
            verb, f"{serving.url}/v1/{path}", content=b"{}", headers=headers
        )
        assert stored.headers["ratelimit-policy"] == '"operations";q=20000;w=10'
    serving.add_tenant("acme", requests_per_s=0.001)  # 100 at once
    statuses: list[int] = []
    while 429 not in statuses:  # ten come back in a second
        answers = await asyncio.gather(
            *(
                serving.client.post(f"{serving.url}/v1/{path}", json={}, headers=headers)
                for _ in range(50)
                for path in ("dicts/seen", "volumes/data:reload")
            )
        )
        statuses += [answer.status_code for answer in answers]
    assert 429 not in statuses[:100]


async def test_what_requests_to_sandboxes_move_counts_too(serving: Edge) -> None:
    sandbox = await create(serving)
    serving.add_tenant("acme", requests_per_s=0.001)
    statuses = []
    for _ in range(4):  # 2 MiB there and back: 65 operations each
        answer = await ask(serving, sandbox, "files", "PUT", content=bytes(MAX_BODY_BYTES))
        statuses.append(answer.status_code)
    assert statuses == [200, 200, 429, 429]
    assert 2 <= int(answer.headers["retry-after"]) <= 4


async def test_requests_that_wait_have_a_number_at_once(serving: Edge) -> None:
    sandbox = await create(serving)
    serving.add_tenant("acme", concurrent=1)

    async def follow() -> int:
        url = f"{serving.url}/v1/calls/{sandbox}?wait_s=20"
        headers = {"authorization": f"Bearer {KEY}"}
        return (await serving.client.get(url, headers=headers)).status_code

    waiting = [asyncio.create_task(follow()) for _ in range(17)]
    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert [each.result() for each in done] == [429]
    for each in waiting:
        each.cancel()
    await asyncio.wait(waiting)
    await until(lambda: serving.quotas.held(f"operations:{TENANT}") == 0)


async def test_an_answer_without_end_is_cut(serving: Edge) -> None:
    sandbox = await create(serving)
    assert (await ask(serving, sandbox, "exec", "POST")).status_code == 200
    (worker_of_it,) = serving.fleet.workers.values()
    piece = b"x" * 65536

    async def pieces(number: int) -> AsyncIterator[bytes]:
        for _ in range(number):
            yield piece

    async def answers(request: WorkerRequest) -> WorkerAnswer:
        number = MAX_ANSWER_BYTES // len(piece) + (16 if "long" in request.path else 0)
        return WorkerAnswer(chunks=pieces(number))

    worker_of_it.behaviour = answers
    whole = await ask(serving, sandbox, "files?path=whole")
    assert len(whole.content) == MAX_ANSWER_BYTES
    with pytest.raises(httpx.RemoteProtocolError):
        await ask(serving, sandbox, "files?path=long")


async def test_a_sandbox_is_not_created_with_a_pickle(serving: Edge) -> None:
    headers = {"authorization": f"Bearer {KEY}", "content-type": CONTENT_PICKLE}
    url = f"{serving.url}/v1/functions/shop/sandbox-1:submit"
    refused = await serving.client.post(url, headers=headers, content=b"x")
    assert (refused.status_code, "JSON" in refused.text) == (415, True)


async def test_a_sandbox_that_says_it_was_busy_is_not_begun_again(serving: Edge) -> None:
    began: list[str] = []

    async def busy(request: WorkerRequest) -> WorkerAnswer:
        began.append(request.path)
        return WorkerAnswer(status=503, body=b"{}", outcome="busy")

    serving.fleet.behaviour = busy
    sandbox = await create(serving)
    url = f"{serving.url}/v1/calls/{sandbox}?wait_s=5"
    headers = {"authorization": f"Bearer {KEY}"}
    record = (await serving.client.get(url, headers=headers)).json()
    assert (record["state"], record["status"]) == ("FAILED", 503)
    assert began == ["/invoke/"]


async def test_a_broken_connection_is_no_invitation_to_execute_again(serving: Edge) -> None:
    sandbox = await create(serving)
    assert (await ask(serving, sandbox, "exec", "POST")).status_code == 200
    (worker_of_it,) = serving.fleet.workers.values()

    async def breaks(request: WorkerRequest) -> WorkerAnswer:
        for connection in list(worker_of_it.connections):
            if connection.request is request:
                connection.abort()
        return WorkerAnswer()

    worker_of_it.behaviour = breaks
    broken = await ask(serving, sandbox, "exec", "POST", content=b"{}")
    assert (broken.status_code, "not known what it did" in broken.text) == (502, True)
    encoded = await ask(
        serving, sandbox, "files?path=a", "PUT", content=b"x", encoding={"content-encoding": "gzip"}
    )
    assert encoded.status_code == 415


@pytest.mark.parametrize(
    "place, methods",
    [
        ("exec", ("POST",)),
        ("files", ("GET", "PUT", "DELETE")),
        ("directory", ("GET", "POST")),
        ("processes/7", ("GET",)),
        ("processes/7/stdin", ("POST",)),
        ("processes/7/kill", ("POST",)),
    ],
)
def test_the_methods_of_a_place(place: str, methods: tuple[str, ...]) -> None:
    assert methods_of(place) == methods


@pytest.mark.parametrize("place", ["", "other", "processes", "processes/x", "exec/..", "exec "])
def test_other_places_are_not_served(place: str) -> None:
    with pytest.raises(NotFound):
        methods_of(place)


def test_a_sandbox_that_failed_is_no_dead_letter() -> None:
    record = CallRecord(
        id="req-1",
        tenant="t",
        environment="main",
        app="a",
        function="f",
        method="",
        state="FAILED",
        sequence=1,
        submitted_at=0.0,
        status=500,
    )
    assert is_dead(record)
    labelled = CallRecord.from_json({**record.to_json(), "labels": {LABEL: "true"}})
    assert not is_dead(labelled)


async def test_a_sandbox_of_a_dead_activator_is_not_begun_again(short_tmp: Path) -> None:
    settings = ActivatorSettings()
    first = Edge(short_tmp, settings, worker)
    first.add(route_of(sandbox_spec()))
    tasks = [asyncio.create_task(first.books.run())]
    caller = first.table.authenticate(f"Bearer {KEY}".encode(), 0.0)
    call = call_of(target_of(sandbox_spec()), b"{}", key_id=caller.key_id)
    await first.calls.accept(caller, call, fingerprint="")
    await until(lambda: any(w.requests for w in first.fleet.workers.values()))
    await first.calls.aclose()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await _close(first)

    controller = await FakeController(short_tmp / "controller.sock").start()
    second = Edge(short_tmp, settings, worker)
    second.add(route_of(sandbox_spec()))
    async with asyncio.TaskGroup() as group:
        books = group.create_task(second.books.run())
        (shipping,) = second.calls.start(group)
        await until(lambda: controller.calls.get("req-1", {}).get("state") == "FAILED")
        for task in (books, shipping):
            task.cancel()
    await second.calls.aclose()
    await _close(second)
    await controller.aclose()
    assert controller.calls["req-1"]["status"] == 502
    assert not second.fleet.workers


async def _close(edge: Edge) -> None:
    await edge.scaler.aclose()
    await edge.books.aclose()
    await edge.client.aclose()
    await edge.control.aclose()
    await edge.fleet.aclose()
