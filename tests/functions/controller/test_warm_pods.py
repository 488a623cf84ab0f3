"""The routes by which activators claim warm pods and end promoted ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pilotlight.controller.kubernetes.warm.status import (
    NoWarmPod,
    PoolShape,
    PromotedPod,
    PromotionRequest,
)
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.protocol import PODS_DELETE_PATH, PODS_PROMOTE_PATH
from pilotlight.spec.warm_shape import WarmShape
from tests.functions.controller.conftest import Controller

RUNTIME = "registry.example/runtime@sha256:" + "0" * 64
POD = PromotedPod(
    namespace="pilotlight-warm",
    name="small-1",
    uid="u-1",
    ip="10.1.0.7",
    node="node-1",
    launch={"revision": "f-1@v1"},
)
WANTED: dict[str, Any] = {
    "tenant": "t-1",
    "revision": "f-1@v1-000001",
    "attempt": "i-1",
    "member": "a-0",
}
ENDED = {"namespace": "pilotlight-warm", "name": "small-1", "uid": "u-1", "reason": "idle"}


@dataclass(kw_only=True)
class SmallClaimer:
    """Has one pod for the first start, and notes what it is asked for."""

    asked: list[PromotionRequest] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    async def promote(self, wanted: PromotionRequest) -> PromotedPod:
        """The pod, or none."""
        self.asked.append(wanted)
        if wanted.attempt != "i-1":
            raise NoWarmPod("no warm pod is ready; 1 starts", reason="empty", retry_after_s=2.0)
        return POD

    async def delete(self, *, namespace: str, name: str, uid: str, reason: str) -> None:
        """Note it."""
        self.ended.append(f"{namespace}/{name} {uid} {reason}")


@pytest.fixture
def claimer(controller: Controller) -> Iterator[SmallClaimer]:
    """Of a leader with a shape."""
    cluster = ClusterSettings(runtime_image=RUNTIME, warm_pods=[WarmShape(name="small")])
    config = replace(controller.context.config, cluster=cluster)
    object.__setattr__(controller.context, "config", config)
    made = SmallClaimer()
    controller.context.warm_pods.claimer = made
    yield made
    controller.context.warm_pods.claimer = None


async def test_an_activator_gets_a_pod_and_ends_it(
    controller: Controller, claimer: SmallClaimer, registry: CollectorRegistry
) -> None:
    answer = await controller.internal(PODS_PROMOTE_PATH, {**WANTED, "exclude": ["u-0"]})
    assert (answer.status_code, answer.json()) == (
        200,
        {
            "namespace": "pilotlight-warm",
            "name": "small-1",
            "uid": "u-1",
            "ip": "10.1.0.7",
            "node": "node-1",
            "launch": {"revision": "f-1@v1"},
        },
    )
    assert claimer.asked == [PromotionRequest(exclude=("u-0",), **WANTED)]
    answer = await controller.internal(PODS_DELETE_PATH, ENDED)
    assert (answer.status_code, claimer.ended) == (204, ["pilotlight-warm/small-1 u-1 idle"])
    found = registry.get_sample_value(
        "pilotlight_controller_promotions_total", {"outcome": "promoted"}
    )
    assert found == 1


async def test_without_a_pod_the_answer_says_why_and_whether_waiting_helps(
    controller: Controller, claimer: SmallClaimer
) -> None:
    answer = await controller.internal(PODS_PROMOTE_PATH, {**WANTED, "attempt": "i-2"})
    assert (answer.status_code, answer.headers["retry-after"]) == (409, "2")
    body = answer.json()
    assert (body["type"].rpartition("/")[2], body["reason"]) == ("no-warm-pod", "empty")
    controller.context.warm_pods.claimer = None
    for path, asked in ((PODS_PROMOTE_PATH, WANTED), (PODS_DELETE_PATH, ENDED)):
        answer = await controller.internal(path, asked)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_where_there_are_no_shapes_there_are_no_warm_pods(controller: Controller) -> None:
    answer = await controller.internal(PODS_PROMOTE_PATH, WANTED)
    assert (answer.status_code, answer.json()["reason"]) == (409, "off")


async def test_nobody_but_the_platforms_processes_claims_pods(
    controller: Controller, claimer: SmallClaimer
) -> None:
    for path, asked in ((PODS_PROMOTE_PATH, WANTED), (PODS_DELETE_PATH, ENDED)):
        assert (await controller.http.post(path, json=asked)).status_code == 403
    assert not claimer.asked
    assert not claimer.ended


@pytest.mark.parametrize(
    "changed",
    [
        {"tenant": "t" * 129},
        {"tenant": ""},
        {"revision": "a b"},
        {"attempt": "i\n1"},
        {"member": 3},
        {"exclude": ["u"] * 65},
        {"exclude": ["u" * 129]},
        {"more": 1},
    ],
)
async def test_what_is_out_of_bounds_is_refused(
    controller: Controller, claimer: SmallClaimer, changed: dict[str, Any]
) -> None:
    answer = await controller.internal(PODS_PROMOTE_PATH, {**WANTED, **changed})
    assert answer.status_code == 400
    assert not claimer.asked


async def test_the_operator_sees_the_pool(
    controller: Controller, registry: CollectorRegistry
) -> None:
    one = PoolShape(shape="small", wanted=3, warm=2, starting=1, promoted=4)
    controller.context.warm_pods.shapes = (one,)
    controller.context.warm_pods.trouble = "pods do not grow: no right"
    found = (await controller.http.get("/v1/cluster")).json()
    counts = [{"shape": "small", "wanted": 3, "warm": 2, "starting": 1, "promoted": 4}]
    assert (found["warm_pods"], found["warm_trouble"]) == (counts, "pods do not grow: no right")
    controller.context.metrics.set_warm_pods(controller.context.warm_pods.counts())
    name = "pilotlight_controller_warm_pods"
    assert registry.get_sample_value(name, {"shape": "small", "state": "promoted"}) == 4
    controller.context.metrics.set_warm_pods({})
    assert registry.get_sample_value(name, {"shape": "small", "state": "promoted"}) is None
