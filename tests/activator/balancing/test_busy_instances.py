"""Instances that answer "busy": each attempt has a record that costs nothing, so there are few."""

from __future__ import annotations

import pytest

from activator.balancing.instance import BUSY_PAUSE_S, Instance
from tests.activator.conftest import Edge
from tests.activator.test_gateway import until
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.routes import route_of, spec_of


async def ok(request: WorkerRequest) -> WorkerAnswer:
    return WorkerAnswer()


async def instance_of(edge: Edge) -> Instance:
    edge.fleet.behaviour = ok
    edge.add(route_of(spec_of("resize")))
    assert (await edge.call("shop/resize:invoke", json={"x": 1})).status_code == 200
    revisions = edge.scaler.revisions.values()
    (instance,) = (i for one in revisions for i in one.throttler.instances.values())
    return instance


async def test_the_pause_after_busy_doubles_and_ends_with_a_call_that_runs(edge: Edge) -> None:
    instance = await instance_of(edge)
    now, pauses = 1000.0, []
    instance.blocked_until = 0.0
    for _ in range(8):
        instance.block(now)
        instance.block(now)  # of several calls at once one counts
        pauses.append(instance.blocked_until - now)
        now = instance.blocked_until
    assert pauses == pytest.approx([BUSY_PAUSE_S * 2**n for n in (0, 1, 2, 3, 4, 5, 5, 5)])
    instance.blocked_until = 0.0
    assert (await edge.call("shop/resize:invoke", json={"x": 1})).status_code == 200
    assert instance.busy_answers == 0


async def test_a_worker_that_is_always_busy_makes_few_records(edge: Edge) -> None:
    instance = await instance_of(edge)
    (worker,) = edge.fleet.workers.values()
    before = len(worker.requests)

    async def busy(request: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(status=503, body=b"{}", outcome="busy")

    worker.behaviour = busy
    answer = await edge.call("shop/resize:invoke", json={"x": 1})
    assert answer.status_code == 200  # of another instance
    await until(lambda: instance.is_gone)
    assert len(worker.requests) - before < 12  # one each 20 ms were a hundred
