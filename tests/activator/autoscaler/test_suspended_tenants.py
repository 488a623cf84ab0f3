"""What runs for a tenant when it is suspended."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import httpx
import pytest
import websockets
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, unix_serve

from activator.autoscaler.suspended_tenants import GRACE_S
from pilotlight.spec.function import Clocks, FunctionKind, MethodSpec
from pilotlight.spec.instances.scaling import Scaling
from tests.activator.async_calls.test_sandboxes import OTHERS_KEY, create, sandbox_spec
from tests.activator.conftest import Edge
from tests.activator.test_gateway import until
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.routes import TENANT, route_of, spec_of

OTHER = "t-000000000002"


async def endless(request: WorkerRequest) -> WorkerAnswer:
    await asyncio.Event().wait()
    raise AssertionError(request)


def tick(edge: Edge, now: float) -> None:
    """What the loop does with suspended tenants in one turn at `now`."""
    for throttler in edge.scaler.throttlers():
        edge.scaler.suspended_tenants.end_calls(throttler, now)


@pytest.fixture(name="busy")
async def _busy(edge: Edge) -> tuple[Edge, list[asyncio.Task[httpx.Response]]]:
    """Two tenants' calls that do not end; the first tenant has a sandbox, too."""
    edge.fleet.behaviour = endless
    edge.add_key(OTHERS_KEY, tenant=OTHER)
    edge.add_tenant("other", tenant=OTHER)
    spec = spec_of(clocks=Clocks(execution_s=600), idempotent=True)
    edge.add(route_of(spec))
    edge.add(route_of(spec, tenant=OTHER, app="stall"))
    edge.add(route_of(sandbox_spec()))
    await create(edge)
    calls = [
        asyncio.create_task(edge.call(json={"x": 1})),
        asyncio.create_task(edge.call("stall/hello:invoke", json={"x": 1}, key=OTHERS_KEY)),
    ]
    await until(lambda: sum(t.in_flight for t in edge.scaler.throttlers()) == 3)
    return edge, calls


async def test_all_that_runs_for_a_suspended_tenant_ends_after_a_grace(
    busy: tuple[Edge, list[asyncio.Task[httpx.Response]]],
) -> None:
    edge, (own, others) = busy
    edge.add_tenant("acme", suspended=True)
    tick(edge, 1000.0)
    tick(edge, 1000.0 + GRACE_S - 1)
    assert not edge.fleet.stopped

    tick(edge, 1000.0 + GRACE_S)
    await until(lambda: len({instance for instance, _ in edge.fleet.stopped}) == 2)
    while not own.done():  # it is idempotent: what is sent again ends, too
        tick(edge, 1000.0 + GRACE_S + 1)
        await asyncio.sleep(0.01)
    assert own.result().json()["type"].endswith(("/forbidden", "/worker-crashed"))
    await until(
        lambda: (
            not edge.calls.pending.tasks()
            or all(task.done() for task in edge.calls.pending.tasks())
        )
    )
    assert not others.done()
    others.cancel()


async def test_a_tenant_that_is_resumed_within_the_grace_loses_nothing(
    busy: tuple[Edge, list[asyncio.Task[httpx.Response]]],
) -> None:
    edge, calls = busy
    edge.add_tenant("acme", suspended=True)
    tick(edge, 1000.0)
    edge.add_tenant("acme")
    tick(edge, 1001.0)
    edge.add_tenant("acme", suspended=True)
    tick(edge, 1000.0 + GRACE_S)
    assert not edge.fleet.stopped
    for call in calls:
        call.cancel()


async def test_all_that_runs_for_a_deleted_tenant_ends_at_once_and_is_billed(
    busy: tuple[Edge, list[asyncio.Task[httpx.Response]]],
) -> None:
    edge, (own, others) = busy
    edge.add_tenant("acme", deleted=True)
    assert (await edge.call(json={"x": 1})).status_code == 401
    tick(edge, 1000.0)
    await until(lambda: len({instance for instance, _ in edge.fleet.stopped}) == 2)
    while not own.done():  # it is idempotent: what is sent again ends, too
        tick(edge, 1001.0)
        await asyncio.sleep(0.01)
    assert own.result().status_code in (403, 502)
    await until(lambda: not edge.calls.pending.tasks())
    records = [r for r in (await edge.settle()).values() if r.kind == "CALL"]
    assert {record.tenant for record in records} == {TENANT}
    assert len(records) >= 2
    assert not others.done()
    others.cancel()


async def test_submitted_calls_of_a_deleted_tenant_end_while_they_wait(edge: Edge) -> None:
    edge.fleet.behaviour = endless
    edge.add_tenant("acme")
    edge.add(route_of(spec_of(scaling=Scaling(max_instances=1))))
    for _ in range(3):
        submitted = await edge.call("shop/hello:submit", json={"x": 1})
        assert submitted.status_code == 202, submitted.text
    await asked(edge, 1)
    assert len(edge.calls.pending.tasks()) == 3
    edge.add_tenant("acme", deleted=True)
    await until(lambda: len([t for t in edge.calls.pending.tasks() if not t.done()]) == 1)
    assert not edge.fleet.stopped
    tick(edge, 1000.0)
    await until(lambda: not edge.calls.pending.tasks())
    assert {held.record.state for held in edge.calls.pending} <= {"CANCELLED", "FAILED"}


async def test_nothing_is_kept_ready_for_a_suspended_tenant(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    assert (await edge.call(json={"x": 1})).status_code == 200
    edge.add_tenant("acme", suspended=True)
    (scaled,) = edge.scaler.revisions.values()
    edge.scaler.apply(scaled, time.monotonic())
    await until(lambda: len(edge.fleet.stopped) == 1)
    assert scaled.throttler.min_instances == 0


SHARED = "/t/acme/v1/functions/shop/shared:invoke"
BETA, GAMMA = {"authorization": "Bearer pl_beta"}, {"authorization": "Bearer pl_gamma"}


@pytest.fixture(name="shared")
def _shared(edge: Edge) -> Edge:
    """A function of acme that beta and gamma call, and a web server of acme's for everybody."""
    edge.add_tenant("acme")
    for name, tenant in (("beta", OTHER), ("gamma", "t-000000000003")):
        edge.add_tenant(name, tenant=tenant)
        edge.add_key(f"pl_{name}", tenant=tenant)
    clocks, one = Clocks(execution_s=600), Scaling(max_instances=1, max_inputs=8)
    edge.add(route_of(spec_of("shared", access=("beta", "gamma"), clocks=clocks, scaling=one)))
    edge.add(
        route_of(
            spec_of(
                "site",
                access=("beta", "gamma"),
                kind=FunctionKind.ASGI,
                methods=(MethodSpec(),),
                clocks=clocks,
                scaling=one,
            )
        )
    )
    return edge


def end_of_grace(edge: Edge) -> None:
    """Beta is suspended, and its grace passes."""
    edge.add_tenant("beta", tenant=OTHER, suspended=True)
    tick(edge, 1000.0)
    tick(edge, 1000.0 + GRACE_S - 1)


async def asked(edge: Edge, count: int) -> None:
    await until(
        lambda: sum(len(worker.requests) for worker in edge.fleet.workers.values()) == count
    )


@pytest.mark.parametrize("is_warm", [False, True])
async def test_a_suspended_tenants_call_of_anothers_function_ends_after_the_grace(
    shared: Edge, is_warm: bool
) -> None:
    if is_warm:
        for _ in range(2):
            first = await shared.client.post(f"{shared.url}{SHARED}", json={"x": 1}, headers=BETA)
            assert first.status_code == 200
    shared.fleet.behaviour = endless
    for worker in shared.fleet.workers.values():
        worker.behaviour = endless
    calls = [
        asyncio.create_task(
            shared.client.post(f"{shared.url}{SHARED}", json={"x": 1}, headers=whose)
        )
        for whose in (BETA, GAMMA)
    ]
    await asked(shared, 2 * is_warm + 2)
    end_of_grace(shared)
    await asyncio.sleep(0)
    assert not any(call.done() for call in calls)

    tick(shared, 1000.0 + GRACE_S)
    answer = await calls[0]
    assert (answer.status_code, answer.json()["detail"]) == (
        403,
        "the tenant that makes this call is suspended",
    )
    assert not calls[1].done()
    assert not shared.fleet.stopped
    calls[1].cancel()


async def test_a_suspended_tenants_waiting_call_of_anothers_function_ends_after_the_grace(
    edge: Edge, shared: Edge
) -> None:
    shared.add(route_of(spec_of("shared", access=("beta",), scaling=Scaling(max_instances=1))))
    shared.fleet.behaviour = endless
    own = asyncio.create_task(edge.call("shop/shared:invoke", json={"x": 1}))
    await asked(shared, 1)
    waiting = asyncio.create_task(
        shared.client.post(f"{shared.url}{SHARED}", json={"x": 1}, headers=BETA)
    )
    await until(lambda: sum(t.waiting for t in edge.scaler.throttlers()) == 1)
    end_of_grace(shared)
    tick(shared, 1000.0 + GRACE_S)
    assert (await waiting).status_code == 403
    assert not own.done()
    own.cancel()


async def test_a_suspended_tenants_streams_from_anothers_function_break_off(shared: Edge) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"one"
        await asyncio.Event().wait()

    async def stream(request: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(chunks=pieces(), content_type="text/plain")

    shared.fleet.behaviour = stream
    for path in (SHARED, "/t/acme/fn/shop/site/page"):
        async with shared.client.stream(
            "POST", f"{shared.url}{path}", json={"x": 1}, headers=BETA
        ) as answer:
            received = answer.aiter_bytes()
            assert await anext(received) == b"one"
            end_of_grace(shared)
            tick(shared, 1000.0 + GRACE_S)
            with pytest.raises(httpx.RemoteProtocolError):
                await anext(received)
        shared.add_tenant("beta", tenant=OTHER)
    await until(lambda: all(t.in_flight == 0 for t in shared.scaler.throttlers()))


async def test_a_suspended_tenants_request_of_anothers_server_ends_after_the_grace(
    shared: Edge,
) -> None:
    shared.fleet.behaviour = endless
    asking = asyncio.create_task(
        shared.client.get(f"{shared.url}/t/acme/fn/shop/site/page", headers=BETA)
    )
    await asked(shared, 1)
    end_of_grace(shared)
    tick(shared, 1000.0 + GRACE_S)
    assert (await asking).status_code == 403


async def test_a_suspended_tenants_websocket_to_anothers_server_ends_after_the_grace(
    shared: Edge,
) -> None:
    page = f"{shared.url}/t/acme/fn/shop/site/page"
    assert (await shared.client.get(page, headers=BETA)).status_code == 200
    (info,) = shared.fleet.infos.values()
    await shared.fleet.workers[info.id].aclose()

    async def greet(caller: ServerConnection) -> None:
        with contextlib.suppress(websockets.ConnectionClosed):
            await caller.send("hello")
            await caller.wait_closed()

    async with (
        unix_serve(greet, str(info.socket)),
        connect(page.replace("http", "ws", 1), additional_headers=BETA, proxy=None) as socket,
    ):
        assert await socket.recv() == "hello"
        end_of_grace(shared)
        tick(shared, 1000.0 + GRACE_S)
        with pytest.raises(websockets.ConnectionClosedError) as closed:
            await socket.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.reason == "the tenant that makes this call is suspended"


async def test_a_suspended_tenants_submitted_call_of_anothers_function_fails_after_the_grace(
    shared: Edge,
) -> None:
    shared.fleet.behaviour = endless
    submitted = await shared.client.post(
        f"{shared.url}{SHARED.replace(':invoke', ':submit')}", json={"x": 1}, headers=BETA
    )
    assert submitted.status_code == 202, submitted.text
    await asked(shared, 1)
    end_of_grace(shared)
    tick(shared, 1000.0 + GRACE_S)
    await until(
        lambda: (
            not shared.calls.pending.tasks()
            or all(task.done() for task in shared.calls.pending.tasks())
        )
    )
    (record,) = [r for r in (await shared.settle()).values() if r.kind == "CALL"]
    assert (record.status, record.caller) == (403, OTHER)


async def test_a_grace_begins_again_with_each_suspension(shared: Edge) -> None:
    shared.fleet.behaviour = endless
    call = asyncio.create_task(
        shared.client.post(f"{shared.url}{SHARED}", json={"x": 1}, headers=BETA)
    )
    await asked(shared, 1)
    end_of_grace(shared)
    shared.add_tenant("beta", tenant=OTHER)
    tick(shared, 1000.0 + GRACE_S)
    shared.add_tenant("beta", tenant=OTHER, suspended=True)
    tick(shared, 1001.0 + GRACE_S)
    await asyncio.sleep(0.01)
    assert not call.done()
    call.cancel()
