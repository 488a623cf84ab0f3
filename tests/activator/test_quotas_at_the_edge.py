"""Quotas over real HTTP: who is refused, what refusals and answers say, and that nothing stays held
whatever becomes of a call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from activator.settings import ActivatorSettings
from pilotlight.spec.function import Clocks, FunctionKind, MethodSpec
from pilotlight.spec.instances.scaling import Scaling
from tests.activator.conftest import KEY, Edge
from tests.activator.test_gateway import forever, problem_of, until
from tests.fakes.fake_controller import FakeController
from tests.fakes.fake_worker import Script, WorkerAnswer, WorkerRequest, echo
from tests.fakes.routes import TENANT, route_of, spec_of

HELLO = f"{TENANT}/main/shop/hello"
AUTHORIZED = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(name="settings")
def _settings() -> ActivatorSettings:
    return ActivatorSettings(max_body_bytes=1000, unauthenticated_per_s=5.0)


@pytest.fixture(name="shop")
async def _shop(edge: Edge) -> Edge:
    """A function that several calls may run on at once."""
    edge.add(route_of(spec_of(scaling=Scaling(max_inputs=8), clocks=Clocks(execution_s=30))))
    return edge


def held(edge: Edge) -> int:
    return edge.quotas.held(f"tenant:{TENANT}")


async def warm(edge: Edge) -> None:
    """One call, so that the next ones go without a task."""
    assert (await edge.call(json={"x": 0})).status_code == 200


@pytest.mark.parametrize("is_warm", [False, True])
async def test_a_call_over_its_quota_is_429_with_the_time_to_come_back(
    shop: Edge, is_warm: bool
) -> None:
    shop.add_tenant("acme", requests_per_s=0.025, burst=2)
    await warm(shop)
    await shop.call(json={"x": 1})
    answer = await shop.call(json={"x": 2}, headers={} if is_warm else {"pilotlight-timeout": "9"})

    assert answer.status_code == 429
    assert 10 <= int(answer.headers["retry-after"]) <= 40
    problem = problem_of(answer)
    assert (problem["quota"], problem["of"], problem["limit"]) == (
        "requests_per_s",
        "tenant",
        0.025,
    )
    assert str(problem["type"]).endswith("/over-quota")
    assert problem["instance"] == answer.headers["x-request-id"]
    assert answer.headers["ratelimit-policy"] == '"tenant";q=2;w=80'
    assert answer.headers["ratelimit"].startswith('"tenant";r=0;t=')


@pytest.mark.parametrize("headers", [{}, {"pilotlight-timeout": "9"}], ids=["warm", "task"])
async def test_answers_say_what_is_left(shop: Edge, headers: dict[str, str]) -> None:
    shop.add_tenant("acme", requests_per_s=0.001, burst=10, concurrent=3)
    await warm(shop)
    answers = [await shop.call(json={"x": 1}, headers=headers) for _ in range(2)]

    assert [a.headers["ratelimit"].partition(";t=")[0] for a in answers] == [
        '"tenant";r=8',
        '"tenant";r=7',
    ]
    assert '"tenant-concurrent";r=' in answers[0].headers["ratelimit"]
    assert (
        answers[0].headers["ratelimit-policy"]
        == '"tenant";q=10;w=10000, "tenant-concurrent";q=3;qu="concurrent-requests"'
    )


async def test_errors_say_it_too_and_cost_a_request(shop: Edge) -> None:
    shop.add_tenant("acme", requests_per_s=0.001, burst=3)
    wrong = await shop.call(json={"x": "one"})
    assert wrong.status_code == 400
    assert wrong.headers["ratelimit"].startswith('"tenant";r=2')
    assert "ratelimit" not in (await shop.call(json={"x": 1}, key="pl_wrong")).headers


async def test_where_nothing_is_bounded_nothing_is_said(shop: Edge) -> None:
    assert "ratelimit-policy" not in (await shop.call(json={"x": 1})).headers


@pytest.mark.parametrize("is_warm", [False, True])
async def test_so_many_calls_run_at_once(shop: Edge, script: Script, is_warm: bool) -> None:
    shop.add_tenant("acme", concurrent=2)
    if is_warm:
        await warm(shop)
    script.now = forever
    running = [asyncio.create_task(shop.call(json={"x": n})) for n in range(2)]
    await until(lambda: held(shop) == 2)

    over = await shop.call(json={"x": 3})
    assert (over.status_code, over.headers["retry-after"]) == (429, "1")
    assert problem_of(over)["quota"] == "concurrent"

    for call in running:
        call.cancel()
    await until(lambda: held(shop) == 0)


async def test_nothing_stays_held_whatever_becomes_of_a_call(shop: Edge, script: Script) -> None:
    shop.add_tenant("acme", concurrent=8)
    await warm(shop)
    await shop.call(json={"x": "bad"})
    await shop.call(content=b"x" * 2000)
    await shop.call("shop/hello.nothing:invoke", json={})
    script.now = forever
    dying = asyncio.create_task(shop.call(json={"x": 1}))
    await until(lambda: held(shop) == 1)
    for instance in list(shop.fleet.workers):
        await shop.fleet.kill(instance, "crashed")
    assert (await dying).status_code == 502

    assert held(shop) == 0


async def test_a_stream_is_held_to_its_last_byte(shop: Edge, script: Script) -> None:
    shop.add_tenant("acme", concurrent=1)
    go_on = asyncio.Event()

    async def items() -> AsyncIterator[bytes]:
        yield b"1\n"
        await go_on.wait()
        yield b"2\n"

    async def stream(request: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(chunks=items(), content_type="application/x-ndjson")

    script.now = stream
    async with shop.client.stream(
        "POST", f"{shop.url}/v1/functions/shop/hello:invoke", json={"x": 1}, headers=AUTHORIZED
    ) as answer:
        lines = answer.aiter_lines()
        assert await anext(lines) == "1"
        assert answer.headers["ratelimit"] == '"tenant-concurrent";r=0'
        assert (await shop.call(json={"x": 1})).status_code == 429
        go_on.set()
        assert await anext(lines) == "2"
    await until(lambda: held(shop) == 0)


async def test_a_function_and_a_key_have_quotas_of_their_own(shop: Edge) -> None:
    shop.tell("quota", HELLO, {"requests_per_s": 0.001, "burst": 3})
    shop.add_key("pl_tight", scope="invoke", quotas={"requests_per_s": 0.001, "burst": 1})
    assert (await shop.call(json={"x": 1}, key="pl_tight")).status_code == 200
    over_key = await shop.call(json={"x": 1}, key="pl_tight")
    assert problem_of(over_key)["of"] == "key"
    assert over_key.headers["ratelimit-policy"] == '"function";q=3;w=3000, "key";q=1;w=1000'

    assert [(await shop.call(json={"x": 1})).status_code for _ in range(3)] == [200, 200, 429]
    shop.tell("quota", HELLO, None)
    assert (await shop.call(json={"x": 1})).status_code == 200


async def test_a_changed_plan_holds_at_once(shop: Edge) -> None:
    shop.add_tenant("acme", requests_per_s=0.001, burst=1)
    assert [(await shop.call(json={"x": 1})).status_code for _ in range(2)] == [200, 429]
    shop.add_tenant("acme")
    assert (await shop.call(json={"x": 1})).status_code == 200


@pytest.mark.parametrize("path", ["shop/hello:invoke", "shop/hello:submit"])
async def test_a_body_over_the_smallest_quota_is_413(shop: Edge, path: str) -> None:
    shop.add_tenant("acme", body_bytes=500)
    shop.add_key("pl_small", quotas={"body_bytes": 100})
    body = b'{"x":1}' + b" " * 200
    await warm(shop)

    assert (await shop.call(content=body)).status_code == 200
    too_large = await shop.call(path, content=body, key="pl_small")
    assert (too_large.status_code, problem_of(too_large)["limit_bytes"]) == (413, 100)


async def test_a_submitted_call_counts_when_it_comes_and_holds_when_it_runs(
    shop: Edge, controller: FakeController, script: Script
) -> None:
    shop.add_tenant("acme", requests_per_s=0.001, burst=3, concurrent=1)
    gate = asyncio.Event()

    async def wait(request: WorkerRequest) -> WorkerAnswer:
        await gate.wait()
        return await echo(request)

    script.now = wait
    accepted = [await shop.call("shop/hello:submit", json={"x": n}) for n in range(4)]
    assert [a.status_code for a in accepted] == [202, 202, 202, 429]
    assert accepted[0].headers["ratelimit"].startswith('"tenant";r=2')
    await until(lambda: sum(len(w.requests) for w in shop.fleet.workers.values()) == 1)
    assert held(shop) == 1

    gate.set()
    for answer in accepted[:3]:
        url = f"{shop.url}/v1/calls/{answer.json()['id']}?wait_s=20"
        assert (await shop.client.get(url, headers=AUTHORIZED, timeout=30)).json()[
            "state"
        ] == "SUCCEEDED"
    assert held(shop) == 0


async def test_submitted_calls_that_wait_for_their_quota_are_in_nobodys_way(
    shop: Edge, controller: FakeController, script: Script
) -> None:
    shop.add(
        route_of(
            spec_of(scaling=Scaling(max_inputs=1, max_instances=2), clocks=Clocks(execution_s=30))
        )
    )
    shop.add_key("pl_narrow", quotas={"concurrent": 0})
    waiting = [
        await shop.call("shop/hello:submit", json={"x": n}, key="pl_narrow") for n in range(4)
    ]
    accepted = await shop.call("shop/hello:submit", json={"x": 9})
    url = f"{shop.url}/v1/calls/{accepted.json()['id']}?wait_s=20"

    assert [answer.status_code for answer in waiting] == [202] * 4
    assert (await shop.client.get(url, headers=AUTHORIZED, timeout=30)).json()[
        "state"
    ] == "SUCCEEDED"


@pytest.mark.parametrize("lifted", [{}, {"concurrent": 2}])
async def test_a_submitted_call_runs_when_the_quota_that_held_it_up_is_lifted(
    shop: Edge, controller: FakeController, lifted: dict[str, int]
) -> None:
    shop.add_key("pl_narrow", quotas={"concurrent": 0})
    accepted = await shop.call("shop/hello:submit", json={"x": 1}, key="pl_narrow")
    await until(lambda: bool(shop.quotas.statistics().refused))
    shop.add_key("pl_narrow", quotas=lifted)
    url = f"{shop.url}/v1/calls/{accepted.json()['id']}?wait_s=20"

    assert (await shop.client.get(url, headers=AUTHORIZED, timeout=30)).json()[
        "state"
    ] == "SUCCEEDED"
    assert shop.quotas.held("key:k-pl_narrow") == 0


async def test_a_retried_attempt_costs_a_request(edge: Edge, script: Script) -> None:
    edge.add(route_of(spec_of(idempotent=True)))
    edge.add_tenant("acme", requests_per_s=0.001, burst=10)
    await warm(edge)
    attempts = 0

    async def die_once(request: WorkerRequest) -> WorkerAnswer:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            await edge.fleet.kill(next(iter(edge.fleet.workers)), "crashed")
        return await echo(request)

    script.now = die_once
    answer = await edge.call(json={"x": 1})
    assert answer.status_code == 200
    assert answer.headers["ratelimit"].startswith('"tenant";r=7')  # one before, and two attempts


class TestRaw:
    """`/fn/` and WebSockets go through the same gate."""

    @pytest.fixture(name="site")
    async def _site(self, edge: Edge) -> Edge:
        edge.add(route_of(spec_of("site", kind=FunctionKind.ASGI, methods=(MethodSpec(),))))
        return edge

    async def test_requests_are_counted_held_and_told(self, site: Edge) -> None:
        site.add_tenant("acme", requests_per_s=0.001, burst=2, concurrent=1, body_bytes=10)
        url = f"{site.url}/fn/shop/site/a"
        first = await site.client.get(url, headers=AUTHORIZED)
        assert first.status_code == 200
        assert first.headers["ratelimit"].startswith('"tenant";r=1')
        assert held(site) == 0
        assert (
            await site.client.post(url, headers=AUTHORIZED, content=b"x" * 11)
        ).status_code == 413
        await site.client.get(url, headers=AUTHORIZED)
        over = await site.client.get(url, headers=AUTHORIZED)
        assert (over.status_code, "retry-after" in over.headers) == (429, True)

    async def test_a_body_that_does_not_say_how_long_it_is_is_cut_off_at_its_quota(
        self, site: Edge
    ) -> None:
        site.add_tenant("acme", body_bytes=10)

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(4):
                yield b"12345"

        answer = await site.client.post(
            f"{site.url}/fn/shop/site/a", headers=AUTHORIZED, content=chunks()
        )
        assert answer.status_code == 413

    async def test_a_websocket_over_its_quota_is_refused_before_it_is_accepted(
        self, site: Edge
    ) -> None:
        site.add_tenant("acme", concurrent=0)
        with pytest.raises(InvalidStatus) as refused:
            async with connect(
                site.url.replace("http", "ws") + "/fn/shop/site/chat", additional_headers=AUTHORIZED
            ):
                raise AssertionError("accepted")
        response = refused.value.response
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert held(site) == 0


@pytest.mark.parametrize(
    "plan, asked, status, priority",
    [
        pytest.param({}, None, 200, "standard", id="unlimited"),
        pytest.param({"priority": "batch"}, None, 200, "batch", id="what the plan allows"),
        pytest.param(
            {"priority": "standard"},
            b"realtime",
            200,
            "standard",
            id="no more than the plan allows",
        ),
        pytest.param({"priority": "realtime"}, b"Batch", 200, "batch", id="less"),
        pytest.param({}, b"urgent", 400, None, id="unknown"),
    ],
)
async def test_a_call_has_the_priority_that_it_asks_for_within_its_plan(
    shop: Edge, plan: dict[str, Any], asked: bytes | None, status: int, priority: str | None
) -> None:
    shop.add_tenant("acme", weight=3, **plan)
    target = shop.table.targets_of(HELLO)[0]
    headers = {b"pilotlight-priority": asked} if asked is not None else {}
    if priority is not None:
        caller = shop.table.authenticate(f"Bearer {KEY}".encode(), 0.0)
        rank = shop.entrance.entry(caller, target).caller_of(headers).rank
        assert (rank.priority, rank.tenant, rank.weight) == (priority, TENANT, 3)
    await warm(shop)
    answer = await shop.call(
        json={"x": 1}, headers={k.decode(): v.decode() for k, v in headers.items()}
    )
    assert answer.status_code == status


async def test_every_bound_on_waiting_calls_goes_with_the_rank(shop: Edge) -> None:
    shop.add_tenant("acme", queued=50)
    shop.tell("quota", HELLO, {"queued": 9})
    shop.add_key("pl_q", quotas={"queued": 5})
    entry = shop.entrance.entry(
        shop.table.authenticate(b"Bearer pl_q", 0.0), shop.table.targets_of(HELLO)[0]
    )
    assert entry.caller_of({}).rank.queued == (
        ("tenant", TENANT, 50),
        ("function", HELLO, 9),
        ("key", "k-pl_q", 5),
    )
    assert entry.quota_check is None  # counted where calls wait


async def test_health_and_the_control_plane_are_nobodys_quota(shop: Edge) -> None:
    shop.add_tenant("acme", requests_per_s=0.001, burst=1)
    for _ in range(3):
        answer: httpx.Response = await shop.client.get(f"{shop.url}/healthz", headers=AUTHORIZED)
        assert answer.status_code == 200
    assert (await shop.call(json={"x": 1})).status_code == 200
