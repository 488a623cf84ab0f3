"""Customers of a tenant: which calls name one, who may, and where it is recorded."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest
from prometheus_client import generate_latest
from websockets.asyncio.client import connect

from activator.access import grants
from activator.gateway import route_cache
from pilotlight.controller.scheduling.dispatch_queue import payload
from pilotlight.protocol import CallRecord
from pilotlight.spec.function import Clocks
from tests.activator.conftest import KEY, Edge
from tests.activator.gateway.test_http_proxy import chatting
from tests.activator.test_attempt_endings import ENTRANCES, HEADERS, Submitted, Worker
from tests.activator.test_calls_by_functions import arguments, called, calls, place
from tests.activator.test_gateway import problem_of, until
from tests.fakes.routes import TENANT, route_of, spec_of

OTHER = "t-000000000002"
HEADER = "pilotlight-customer"
NAMING = {
    name: one
    for name, one in ENTRANCES.items()
    if name not in ("scheduled", "shadow copy")  # which no caller makes
}


@pytest.fixture(name="behaviour")
def _behaviour() -> Worker:
    return Worker()


async def customers(edge: Edge) -> list[str]:
    """The customers of the calls so far, in their order."""
    await until(lambda: edge.books.journal.statistics().open_calls == 0)
    records = (await edge.settle()).values()
    calls = [record for record in records if record.kind == "CALL"]
    return [record.customer for record in sorted(calls, key=lambda one: one.started_at)]


@pytest.fixture(name="shop")
def _shop(edge: Edge) -> Edge:
    edge.add(route_of(spec_of()))
    return edge


async def call(edge: Edge, customer: str | None = None, *, key: str = KEY) -> httpx.Response:
    headers = {} if customer is None else {HEADER: customer}
    return await edge.call(json={"x": 1}, headers=headers, key=key)


@pytest.mark.parametrize("name", list(NAMING))
async def test_a_call_by_any_entrance_is_recorded_for_the_customer_that_it_names(
    name: str, edge: Edge, behaviour: Worker
) -> None:
    entrance = NAMING[name]
    entrance.prepare(edge, behaviour)
    for route in entrance.routes(Clocks()):
        edge.add(route)
    named = replace(entrance, headers=(*entrance.headers, (HEADER, "ana")))
    for one in (entrance, named, named, entrance):
        assert (await one.call(edge)).status_code == 200
    assert await customers(edge) == ["", "ana", "ana", ""]


async def test_a_websocket_is_recorded_for_the_customer_that_it_names(edge: Edge) -> None:
    async with chatting(edge) as (url, _):
        async with connect(url, additional_headers={**HEADERS, HEADER: "ana"}) as socket:
            await socket.send("hi")
            await socket.recv()
        assert await customers(edge) == ["", "ana"]


async def test_the_call_of_a_batchs_line_has_the_customer_of_its_batch(shop: Edge) -> None:
    record = CallRecord(
        id="req-1",
        tenant=TENANT,
        environment="main",
        app="shop",
        function="hello",
        method="",
        state="QUEUED",
        sequence=1,
        submitted_at=1.0,
        expires_at=9e9,
    )
    kept = payload(record, body=b'{"x":1}', key=f"k-{KEY}", customer="ana")
    await shop.calls.store({**kept, "due": "req-1"})
    shop.calls.begin_stored(["req-1"], ["req-1"])
    await until(lambda: [held.record.state for held in shop.calls.pending] == ["SUCCEEDED"])
    assert await customers(shop) == ["ana"]


async def test_the_journal_of_a_submitted_call_has_its_customer(shop: Edge) -> None:
    named = Submitted("/v1/functions/shop/hello:submit", headers=((HEADER, "ana"),))
    await named.call(shop)
    files = [one for one in (shop.directory / "journal").rglob("*") if one.is_file()]
    lines = [line for file in files for line in file.read_bytes().split(b"\n")]
    assert [b'"customer":"ana"' in line for line in lines if line.startswith(b'{"t":"S"')] == [True]


@pytest.mark.parametrize("timeout", [{}, {"pilotlight-timeout": "30"}], ids=["warm", "in a task"])
@pytest.mark.parametrize(
    "customer", ["", "-ana", "a na", "ana/1", "*", "a" * 65, "añb", "a\tb", "ana,bob"]
)
async def test_an_invalid_customer_is_refused(
    customer: str, timeout: dict[str, str], shop: Edge
) -> None:
    await call(shop)
    headers = {HEADER: customer.encode(), **timeout}
    answer = await shop.call(json={"x": 1}, headers=headers)
    assert answer.json()["parameter"] == HEADER
    assert problem_of(answer)["status"] == 400
    assert await customers(shop) == [""]


@pytest.mark.parametrize("customer", ["a", "9", "ana.b_c-d:e@example.com", "a" * 64])
async def test_a_valid_customer_is_recorded_as_it_is(customer: str, shop: Edge) -> None:
    for _ in range(2):
        assert (await call(shop, customer)).status_code == 200
    assert await customers(shop) == [customer, customer]


async def test_only_keys_of_the_functions_tenant_name_its_customers(edge: Edge) -> None:
    edge.add_tenant("acme")
    edge.add_key("pl_other", tenant=OTHER)
    edge.add_key("pl_theirs", tenant=OTHER, scope="invoke", customer="ana")
    edge.add(route_of(spec_of(access=("*",))))
    url = f"{edge.url}/t/acme/v1/functions/shop/hello:invoke"
    for headers in ({}, {"authorization": "Bearer pl_other"}):
        for _ in range(2):
            answer = await edge.client.post(url, json={"x": 1}, headers={**headers, HEADER: "ana"})
            assert answer.status_code == 403
            assert "only its own keys" in answer.json()["detail"]
            answer = await edge.client.post(url, json={"x": 1}, headers=headers)
            assert answer.status_code == 200
    bound = {"authorization": "Bearer pl_theirs"}  # to a customer of its own tenant
    assert (await edge.client.post(url, json={"x": 1}, headers=bound)).status_code == 200
    assert await customers(edge) == [""] * 5


async def test_the_holder_of_a_bound_key_names_no_other_customer(shop: Edge) -> None:
    shop.add_key("pl_ana", scope="invoke", customer="ana")
    for _ in range(2):  # the first one brings the instance up
        for customer in (None, "ana"):
            assert (await call(shop, customer, key="pl_ana")).status_code == 200
        answer = await call(shop, "bob", key="pl_ana")
        assert answer.status_code == 403
        assert "for customer 'ana' only" in answer.json()["detail"]
    assert await customers(shop) == ["ana"] * 4


async def test_a_function_calls_for_the_customer_of_its_own_call_unless_it_names_another(
    edge: Edge,
) -> None:
    place(edge, "outer", calls("shop/inner"))
    place(edge, "broker", calls("shop/inner", headers={HEADER: "bob"}))
    place(edge, "inner", arguments)
    await called(edge, headers={HEADER: "ana"})
    await called(edge)
    await called(edge, "broker", headers={HEADER: "ana"})
    await until(lambda: edge.books.journal.statistics().open_calls == 0)
    found = [(r.function, r.customer) for r in (await edge.settle()).values() if r.kind == "CALL"]
    assert sorted(found) == [
        ("broker", "ana"),
        ("inner", ""),
        ("inner", "ana"),
        ("inner", "bob"),
        ("outer", ""),
        ("outer", "ana"),
    ]


async def test_a_customer_for_each_call_takes_bounded_memory(
    shop: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route_cache, "MAX_HEADS", 8)
    await call(shop)
    heads = []
    for n in range(30):
        assert (await call(shop, f"c-{n}")).status_code == 200
        heads.append(repr(shop.functions.routes))
    assert set(heads) == {f"<RouteCache 1 routes, {n} heads>" for n in range(1, 9)}
    assert b"c-29" not in generate_latest(shop.metrics.registry)


# -- quotas ----------------------------------------------------------------------------------------
def bound(edge: Edge, customer: str, **quotas: float) -> None:
    edge.tell("quota", f"{TENANT}/{customer}", quotas or None)


async def statuses(edge: Edge, customer: str | None, count: int, **more: str) -> list[int]:
    return [(await call(edge, customer, **more)).status_code for _ in range(count)]


async def test_a_customers_calls_share_its_quotas_and_others_have_their_own(shop: Edge) -> None:
    shop.add_key("pl_ana", scope="invoke", customer="ana")
    assert await statuses(shop, None, 3) == [200] * 3
    bound(shop, "*", requests_per_s=0.01, burst=2)
    bound(shop, "ben", requests_per_s=0.01, burst=3)
    assert await statuses(shop, "ana", 1) == [200]
    assert await statuses(shop, None, 2, key="pl_ana") == [200, 429]
    assert await statuses(shop, "ben", 4) == [200, 200, 200, 429]
    assert await statuses(shop, "eve", 1) == [200]
    assert await statuses(shop, None, 3) == [200] * 3
    answer = await call(shop, "ana")
    problem = answer.json()
    assert (problem["quota"], problem["of"]) == ("requests_per_s", "customer")
    assert problem["customer"] == "ana"
    assert int(answer.headers["retry-after"]) >= 1
    assert '"customer";q=2' in answer.headers["ratelimit-policy"]
    for customer in ("*", "ben"):
        bound(shop, customer)
    assert await statuses(shop, "ana", 3) == [200] * 3


@pytest.mark.parametrize("name", [one for one in NAMING if one != "fast path"])
async def test_by_any_entrance_a_customer_has_its_quotas(
    name: str, edge: Edge, behaviour: Worker
) -> None:
    entrance = NAMING[name]
    entrance.prepare(edge, behaviour)
    for route in entrance.routes(Clocks()):
        edge.add(route)
    assert (await entrance.call(edge)).status_code == 200
    bound(edge, "ana", requests_per_s=0.01, burst=1)
    url, body = f"{edge.url}{entrance.path}", entrance.body
    headers = {**HEADERS, "content-type": "application/json", **dict(entrance.headers)}
    found = []
    for customer in ("ana", "ana", "ben"):
        named = {**headers, HEADER: customer}
        found.append((await edge.client.post(url, headers=named, content=body)).status_code)
    assert [status // 100 for status in found] == [2, 4, 2]
    assert found[1] == 429


async def test_quotas_of_a_new_customer_with_each_call_take_bounded_memory(
    shop: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grants, "MAX_ENTRIES", 8)
    await call(shop)
    bound(shop, "*", requests_per_s=100, burst=100)
    entries = set()
    for n in range(30):
        assert (await call(shop, f"c-{n}")).status_code == 200
        entries.add(int(repr(shop.entrance).split()[1]))
    assert max(entries) <= 8
