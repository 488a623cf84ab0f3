"""Customers of a tenant: which calls name one, who may, and where it is recorded."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest
from prometheus_client import generate_latest
from websockets.asyncio.client import connect

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
