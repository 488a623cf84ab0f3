"""Pods are asked by one task each, whoever leaves and comes back."""

from __future__ import annotations

import asyncio

from activator.knative.ready import Readiness
from tests.fakes.small_cluster import World


async def test_who_is_left_and_asked_again_at_once_is_asked_by_one_task_that_can_be_left(world: World) -> None:
    target, fleet = world.target(), await world.fleet()
    made = world.maker.made(target)
    await world.maker.boots(made)
    await world.until(lambda: fleet.pods.of(target.key) and fleet.pods.of(target.key)[0].ip)
    (pod,) = fleet.pods.of(target.key)
    readiness = Readiness(port=8080, on_ready=lambda _: None)
    before = asyncio.all_tasks()
    readiness.ask(pod)
    await asyncio.sleep(0)
    readiness.leave(pod.life)
    readiness.ask(pod)
    for _ in range(5):  # the first one ends
        await asyncio.sleep(0)
    readiness.ask(pod)
    assert len(asyncio.all_tasks() - before) == 1
    await readiness.aclose()
    assert asyncio.all_tasks() - before == set()
