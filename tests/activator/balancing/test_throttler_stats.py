"""Calls that wait and calls that run."""

from __future__ import annotations

import asyncio

from activator.balancing.throttler_stats import (
    calls_per_instance,
    desired_pods_hint,
    refuse_waiting,
)
from pilotlight import errors
from pilotlight.spec.instances.scaling import Scaling
from tests.activator.conftest import KEY, Edge
from tests.activator.test_gateway import until
from tests.fakes.routes import route_of, spec_of, target_of


async def test_a_revision_without_an_instance_wants_one_and_with_one_only_what_its_calls_want(
    edge: Edge,
) -> None:
    assert desired_pods_hint(None) == 0
    target = target_of(spec_of())
    edge.add(route_of(spec_of()))
    throttler = edge.scaler.throttler_of(target)
    assert desired_pods_hint(throttler) == 1
    reservation = await throttler.reserve(5)
    assert desired_pods_hint(throttler) == 0
    assert calls_per_instance([throttler]) == {reservation.instance.id: 1}
    reservation.release_unused()
    throttler.is_retired = True
    assert desired_pods_hint(throttler) == 0


async def test_fewer_than_are_kept_warm_is_a_want(edge: Edge) -> None:
    throttler = edge.scaler.throttler_of(
        target_of(spec_of(scaling=Scaling(min_instances=2, max_instances=2)))
    )
    (await throttler.reserve(5)).release_unused()
    for instance in list(throttler.instances.values())[1:]:
        throttler.instance_exited(instance.id, "lost")
    assert desired_pods_hint(throttler) == 1


async def test_all_that_wait_are_refused_at_once(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    edge.fleet.gate.clear()
    calls = [asyncio.create_task(edge.call(json={"x": n}, key=KEY)) for n in range(3)]
    await until(lambda: sum(throttler.waiting for throttler in edge.scaler.throttlers()) == 3)
    assert desired_pods_hint(edge.scaler.throttlers()[0]) == 3
    refuse_waiting(
        edge.scaler.throttlers(),
        errors.Unavailable("this activator is being stopped", retry_after_s=1),
    )
    assert [
        (answer.status_code, answer.headers["retry-after"])
        for answer in await asyncio.gather(*calls)
    ] == [(503, "1")] * 3
    edge.fleet.gate.set()


async def test_a_revision_that_nobody_called_is_not_made_by_asking(edge: Edge) -> None:
    assert edge.scaler.active(target_of(spec_of()).key) is None
    assert not edge.scaler.throttlers()
