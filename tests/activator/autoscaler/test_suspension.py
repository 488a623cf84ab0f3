"""What runs for a tenant when it is suspended."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from activator.autoscaler.suspension import GRACE_S
from pilotlight.spec.function import Clocks
from tests.activator.async_calls.test_sandboxes import OTHERS_KEY, create, sandbox_spec
from tests.activator.conftest import Edge
from tests.activator.test_gateway import until
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.routes import route_of, spec_of

OTHER = "t-000000000002"


async def endless(request: WorkerRequest) -> WorkerAnswer:
    await asyncio.Event().wait()
    raise AssertionError(request)


def tick(edge: Edge, now: float) -> None:
    """What the loop does with suspended tenants in one turn at `now`."""
    for throttler in edge.scaler.throttlers():
        edge.scaler.suspensions.end_calls(throttler, now)


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


async def test_nothing_is_kept_ready_for_a_suspended_tenant(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    assert (await edge.call(json={"x": 1})).status_code == 200
    edge.add_tenant("acme", suspended=True)
    (scaled,) = edge.scaler.revisions.values()
    edge.scaler.apply(scaled, time.monotonic())
    await until(lambda: len(edge.fleet.stopped) == 1)
    assert scaled.throttler.min_instances == 0
