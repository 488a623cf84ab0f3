"""Calls to several instances of one promoted pod, from the caller's side, and their bill."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from activator.gateway.health import Health
from activator.knative.forks import fork_loop as loop_module
from activator.knative.forks.pod_forks import PodForks
from activator.knative.warm.waiting_starts import Promotions
from activator.settings import ActivatorSettings
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.warm_shape import WarmShape
from tests.activator.conftest import Edge, served
from tests.activator.test_gateway import until
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.routes import route_of, spec_of
from tests.fakes.small_cluster import World
from tests.fakes.warm_pool import WarmPool

BURST = 8


class Gates:
    """Functions that answer `x` once they may."""

    def __init__(self, world: World) -> None:
        self.begun: list[int] = []
        self.may_end: dict[int, asyncio.Event] = {}
        world.maker.behaviour = self

    async def __call__(self, request: WorkerRequest) -> WorkerAnswer:
        x = json.loads(request.body)["x"]
        self.begun.append(x)
        await self.may_end.setdefault(x, asyncio.Event()).wait()
        return WorkerAnswer(body=request.body)

    def end(self, *numbers: int) -> None:
        """These may end."""
        for x in numbers:
            self.may_end.setdefault(x, asyncio.Event()).set()


@pytest.fixture
async def edge(
    world: World, pool: WarmPool, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Edge]:
    monkeypatch.setattr(loop_module, "LOOK_S", 0.05)
    promotions = Promotions(
        source=pool.source(),
        has_calls=lambda _: True,
        patience_s=30.0,
        forks=PodForks(shapes=[WarmShape(name="small", memory_bytes=BURST << 30)]),
    )
    fleet = await world.fleet("a-0", promotions=promotions)
    made = Edge(short_tmp, ActivatorSettings(), world.maker.behaviour, fleet=fleet, health=Health())
    async with served(made):
        yield made
    await made.fleet.aclose()


async def test_a_killed_instance_costs_its_own_call_and_each_call_is_billed_once(
    world: World, pool: WarmPool, edge: Edge
) -> None:
    gates = Gates(world)
    one_at_a_time = Scaling(max_inputs=1)
    edge.add(route_of(spec_of("hello", scaling=one_at_a_time)))
    world.target("hello", scaling=one_at_a_time)
    (warm,) = await pool.add()
    warm.room = 2

    def call(x: int) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(edge.call("shop/hello:invoke", json={"x": x}))

    one = call(1)
    await until(lambda: gates.begun == [1])
    two = call(2)
    await until(lambda: gates.begun == [1, 2])
    assert list(warm.forks) == [8081]
    await warm.end(8081, status=137)
    assert (await two).status_code == 502
    three = call(3)
    await until(lambda: gates.begun == [1, 2, 3])
    assert list(warm.forks) == [8082], "the pod's room was given back"
    gates.end(1, 3)
    answers = [await one, await three]
    assert [answer.json() for answer in answers] == [{"x": 1}, {"x": 3}]
    assert answers[1].headers["pilotlight-start"] == "FORK"

    def billed() -> list[tuple[str, str]]:
        calls = [one for one in edge.ledger.records.values() if one.kind == "CALL"]
        return sorted((record.outcome, record.start_kind) for record in calls)

    await until(lambda: len(billed()) == 3)
    assert [outcome for outcome, _ in billed()] == ["error", "ok", "ok"]
    assert len({one.instance for one in edge.ledger.records.values() if one.kind == "CALL"}) == 3
    assert len(pool.asked) == 1


async def test_a_burst_of_calls_from_zero_is_answered_from_one_promoted_pod(
    world: World, pool: WarmPool, edge: Edge
) -> None:
    gates = Gates(world)
    one_at_a_time = Scaling(max_inputs=1)
    edge.add(route_of(spec_of("hello", scaling=one_at_a_time)))
    world.target("hello", scaling=one_at_a_time)
    for warm in await pool.add(BURST):
        warm.room = BURST
    writes = world.server.requests.writes()
    calls = [
        asyncio.create_task(edge.call("shop/hello:invoke", json={"x": x})) for x in range(BURST)
    ]
    await until(lambda: sorted(gates.begun) == list(range(BURST)))  # all run at once
    gates.end(*range(BURST))
    answers = await asyncio.gather(*calls)
    assert [answer.json() for answer in answers] == [{"x": x} for x in range(BURST)]
    kinds = sorted(answer.headers["pilotlight-start"] for answer in answers)
    assert kinds == ["FORK"] * (BURST - 1) + ["RESTORE"]
    assert len(pool.asked) == 1
    assert world.server.requests.writes() == writes
    assert world.wakes == []
    records = edge.ledger.records.values
    await until(lambda: sum(one.kind == "CALL" for one in records()) == BURST)
