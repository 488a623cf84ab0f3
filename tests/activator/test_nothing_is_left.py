"""Whatever becomes of calls, in whatever order: afterwards nothing is held, each attempt has its
record, each call is counted once."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from activator.gateway.shadow_traffic import ShadowTraffic
from activator.resilience.breaker import State
from pilotlight.spec.function import Clocks
from pilotlight.spec.identifiers import Priority
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.observations import SHADOW_ARM, sum_observations
from pilotlight.spec.policies import Fallback, RetryPolicy, Variant
from pilotlight.spec.traffic import Arm, ExperimentTraffic, Shadow
from tests.activator.conftest import Edge
from tests.activator.gateway.test_fast_path import in_flight
from tests.activator.test_gateway import until
from tests.fakes.fake_controller import FakeController
from tests.fakes.fake_worker import Behaviour, WorkerAnswer, WorkerRequest
from tests.fakes.routes import route_of, spec_of, split_route

V1, V2, V3 = "v1-aaaaaa", "v2-bbbbbb", "v3-cccccc"
CALLS = 120
SEEDS = 2
PARTITION = ("answered", "failed", "refused", "cancelled")


class Moody:
    """Does now this, now that."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.edge: Edge | None = None
        self.begun: list[str] = []
        self.kills: list[asyncio.Task[None]] = []

    async def __call__(self, request: WorkerRequest) -> WorkerAnswer:
        self.begun.append(
            f"{request.headers['pilotlight-call']}/{request.headers.get('pilotlight-attempt', '1')}"
        )
        mood = self.random.choices(
            ("well", "raises", "dies", "streams", "breaks", "hangs", "busy", "bad"),
            (40, 15, 6, 8, 3, 5, 5, 5),
        )[0]
        await asyncio.sleep(self.random.random() * 0.004)
        if mood == "raises":
            return WorkerAnswer(status=500, body=b"{}", outcome="raised")
        if mood == "bad":
            return WorkerAnswer(status=400, body=b"{}", outcome="invalid")
        if mood == "busy":
            return WorkerAnswer(status=503, body=b"{}", outcome="busy")
        if mood in ("streams", "breaks"):
            return WorkerAnswer(
                chunks=self._parts(request, breaks=mood == "breaks"),
                content_type="application/x-ndjson",
            )
        if mood == "dies":
            await self._die(request)
        if mood in ("dies", "hangs"):
            await asyncio.Event().wait()
        return WorkerAnswer(body=b"1")

    async def _parts(self, request: WorkerRequest, *, breaks: bool) -> AsyncIterator[bytes]:
        yield b"1\n"
        if breaks:
            await self._die(request)
            await asyncio.Event().wait()
        yield b"2\n"

    async def _die(self, request: WorkerRequest) -> None:
        assert self.edge is not None
        for instance, worker in list(self.edge.fleet.workers.items()):
            if any(one is request for one in worker.requests):
                asyncio.get_running_loop().call_soon(self._kill, instance)

    def _kill(self, instance: str) -> None:
        assert self.edge is not None
        if instance in self.edge.fleet.workers:  # another call did not kill it in the same moment
            self.kills.append(
                asyncio.get_running_loop().create_task(self.edge.fleet.kill(instance, "killed"))
            )


@pytest.fixture(name="behaviour")
def _behaviour() -> Behaviour:
    return Moody(0)


def deploy(edge: Edge) -> None:
    again = RetryPolicy(max_retries=2, initial_delay_s=0.001, max_delay_s=0.004)
    scaling = Scaling(max_instances=4, max_inputs=2, max_queued=6)
    clocks = Clocks(execution_s=1.0, queue_s=2.0)
    rungs = (Fallback(kind="function", function="other"), Fallback(kind="cached", max_age_s=60))
    variants = (Variant(function="small", priorities=tuple(Priority)),)
    arms = (Arm(name="a", revision=V1, share=50), Arm(name="b", revision=V2, share=50))
    experiment = ExperimentTraffic(id="x-1", salt="s", unit="header:x-user", percent=50, arms=arms)
    spec = spec_of(retries=again, fallback=rungs, variants=variants, scaling=scaling, clocks=clocks)
    edge.add(
        split_route(
            spec,
            {V1: 50, V2: 50},
            named=(V3,),
            experiment=experiment,
            shadow=Shadow(revision=V3, max_compute=1.0),
        )
    )
    for name in ("other", "small"):
        edge.add(route_of(spec_of(name=name, scaling=scaling, clocks=clocks)))


async def one(edge: Edge, rng: random.Random, seen: Counter[str]) -> None:
    headers: dict[str, str] = {"x-user": f"u-{rng.randrange(9)}"}
    kind = rng.choice(("plain", "plain", "plain", "deadline", "leaves", "key", "traced"))
    headers |= {
        "deadline": {"pilotlight-timeout": "0.05"},
        "key": {"idempotency-key": f"k-{rng.random()}"},
        "traced": {
            "traceparent": f"00-{rng.getrandbits(128) | 1:032x}-{rng.getrandbits(64) | 1:016x}-01"
        },
    }.get(kind, {})
    await asyncio.sleep(rng.random() * 0.4)
    asked = asyncio.create_task(edge.call(json={"x": 1}, headers=headers))
    if kind == "leaves":
        await asyncio.sleep(rng.random() * 0.05)
        asked.cancel()
    (answer,) = await asyncio.gather(asked, return_exceptions=True)
    if isinstance(answer, asyncio.CancelledError):
        seen["left"] += 1
    elif isinstance(answer, httpx.RemoteProtocolError | httpx.ReadError):
        # half an answer, and the connection is cut
        seen["broken"] += 1
    else:
        assert isinstance(answer, httpx.Response), answer
        seen[str(answer.status_code)] += 1


@pytest.mark.slow  # hundreds of calls
@pytest.mark.parametrize("seed", range(SEEDS))
async def test_nothing_is_left_of_calls_that_end_in_any_way(
    edge: Edge, behaviour: Moody, controller: FakeController, seed: int
) -> None:
    behaviour.edge, behaviour.random = edge, random.Random(seed)
    shadows = ShadowTraffic(
        throttler_of=edge.scaler.throttler_of,
        observer=edge.metrics.observer,
        is_crowded=lambda: False,
    )
    edge.copy_calls(shadows)
    deploy(edge)
    rng, seen = random.Random(seed), Counter[str]()
    submitted = [await edge.call("shop/hello:submit", json={"x": 2}) for _ in range(8)]
    assert {answer.status_code for answer in submitted} == {202}
    await asyncio.gather(*(one(edge, rng, seen) for _ in range(CALLS)))
    await until(lambda: all(held.record.finished_at for held in edge.calls.pending))
    await until(lambda: not edge.idempotency.running)
    await until(lambda: repr(shadows) == "<ShadowTraffic 0 copies running>")
    await until(lambda: in_flight(edge) == 0 and edge.queue.waiting == 0)
    records = list((await edge.settle()).values())

    assert sum(seen.values()) == CALLS
    assert repr(edge.gateway.warm.clocks).startswith("<DeadlineWheel 0 calls ")
    of_calls = [f"{r.call}/{r.attempt}" for r in records if r.kind in ("CALL", "SHADOW")]
    assert Counter(behaviour.begun).most_common(1)[0][1] == 1, "no two attempts under one number"
    assert set(behaviour.begun) <= set(of_calls), "what reached a worker has a record"
    assert edge.books.journal.statistics().open_calls == 0
    counted = sum_observations(
        o
        for o in edge.metrics.observer.drain(1)
        if o.function_id == "f-shop-hello" and o.arm != SHADOW_ARM
    )
    assert counted is not None
    whole = CALLS + len(submitted)
    # some left before their request was read
    assert whole - seen["left"] <= sum(getattr(counted, name) for name in PARTITION) <= whole
    assert counted.cancelled <= seen["left"]
    for scaled in edge.scaler.revisions.values():
        assert scaled.throttler.waiting == 0
        if scaled.throttler.health is not None:
            breaker = scaled.throttler.health.breaker
            assert breaker.state is not State.HALF_OPEN or breaker.admits(time.monotonic())
    assert unfinished() == []


def unfinished() -> list[Any]:
    """Tasks that belong to a call."""
    names = ("call ", "copy of", "claim of")
    return [task for task in asyncio.all_tasks() if task.get_name().startswith(names)]
