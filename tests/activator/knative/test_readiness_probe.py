"""Pods are asked by one task each, whoever leaves and comes back."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from activator.knative.readiness_probe import ReadinessProbe, _parsed, pause_s
from activator.worker_client.connection import WorkerResponse
from tests.fakes.small_cluster import World


async def test_who_is_left_and_asked_again_at_once_is_asked_by_one_task_that_can_be_left(
    world: World,
) -> None:
    target, fleet = world.target(), await world.fleet()
    made = world.maker.made(target)
    await world.maker.boots(made)
    await world.until(lambda: fleet.pods.of(target.key) and fleet.pods.of(target.key)[0].ip)
    (pod,) = fleet.pods.of(target.key)
    readiness = ReadinessProbe(port_of=lambda _: 8080, on_ready=lambda _: None)

    def asking() -> list[asyncio.Task[Any]]:  # of the fleet's own are none: nobody starts anything
        return [task for task in asyncio.all_tasks() if task.get_name() == f"is {pod.name} ready"]

    readiness.probe(pod)
    (left,) = asking()
    await asyncio.sleep(0)
    readiness.stop(pod.life)
    readiness.probe(pod)
    await asyncio.wait([left])
    readiness.probe(pod)
    assert len(asking()) == 1
    assert left not in asking()
    await readiness.aclose()
    assert asking() == []


def said(text: str) -> WorkerResponse:
    return WorkerResponse(None, 200, [], text.encode())


def test_a_pod_chooses_no_labels_of_metrics() -> None:
    phases = {
        "boot": 5.0,
        "code": 2.0,
        "queue": 9.0,
        "enter": -1.0,
        **{f"made-up-{n}": 1.0 for n in range(1000)},
    }
    assert _parsed(said(json.dumps({"phases_ms": phases})), 0.0, 1).phases_ms == {
        "boot": 5.0,
        "code": 2.0,
    }


@pytest.mark.parametrize("text", ['{"running": 1e999}', '{"phases_ms": 5}', "[" * 100_000, "5"])
def test_a_worker_that_answers_nonsense_has_answered(text: str) -> None:
    ready = _parsed(said(text), 1.0, 2)
    assert (ready.phases_ms, ready.running, ready.asks) == ({}, 0, 2)


def test_a_promoted_pod_is_probed_less_often_the_longer_it_takes() -> None:
    def pauses(*probed_s: float) -> list[float]:
        return [pause_s(one, is_promoted=True) for one in probed_s]

    assert pauses(0.0, 0.2, 0.6, 10.0) == pytest.approx([0.01, 0.01, 0.03, 0.05])
    assert pause_s(0.0, is_promoted=False) == 0.05
