"""Calls to functions whose instances are pods, from the caller's side: through the gateway, and
Knative's queue-proxy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from activator.balancing.throttler_stats import desired_pods_hint
from activator.coordination.redis_state import RedisState
from activator.gateway.health import Health
from activator.knative.activation_requests import ActivationRequests
from activator.knative.fleet import KnativeFleet
from activator.knative.leases.redis_pod_leases import RedisPodLeases
from activator.settings import ActivatorSettings
from pilotlight.spec.function import FunctionKind, MethodSpec
from tests.activator.conftest import KEY, Edge, served
from tests.activator.test_gateway import until
from tests.fakes.absence import away
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.knative.queue_proxy import QueueProxy
from tests.fakes.pod_maker import STATUS, FakePod, revision_name_of
from tests.fakes.routes import route_of, spec_of, split_route, target_of
from tests.fakes.small_cluster import World

HEADERS = {"authorization": f"Bearer {KEY}"}
KILLED = {"terminated": {"exitCode": 137, "reason": "Error"}}
SETTINGS = ActivatorSettings(unauthenticated_per_s=5.0)


class Site:
    """An activator on the cluster. `fleet` is its own."""

    def __init__(self, world: World, edge: Edge, fleet: KnativeFleet) -> None:
        self.world = world
        self.edge = edge
        self.fleet = fleet

    def deploy(self, name: str = "hello", **more: Any) -> Any:
        """A function."""
        self.edge.add(route_of(spec_of(name, **more)))
        return self.world.target(name, **more)

    async def call(self, name: str = "hello", *, x: int = 1) -> httpx.Response:
        """It."""
        return await self.edge.call(f"shop/{name}:invoke", json={"x": x})


@contextlib.asynccontextmanager
async def site_of(
    world: World,
    directory: Path,
    member: str = "a-0",
    redis_url: str = "",
    platform: str = "",
    *,
    known: Callable[[Edge], None] = lambda _: None,
) -> AsyncIterator[Site]:
    """One activator; with `redis_url` one of several. `known`: tells it what is on its disk."""
    async with AsyncExitStack() as closing:
        state = None
        if redis_url:
            state = RedisState(redis_url, platform=platform, member=member)
            await state.join()
            closing.push_async_callback(state.aclose)
        wakes = ActivationRequests(
            world.wake_url,
            revision_name_of=revision_name_of,
            waiting_of=lambda key: desired_pods_hint(edge.scaler.active(key)),
        )
        claims = RedisPodLeases(redis_url, platform=platform, member=member) if redis_url else None
        fleet = await world.fleet(member, claims, scale_requester=wakes)
        directory.mkdir(exist_ok=True)
        edge = Edge(
            directory,
            SETTINGS,
            world.maker.behaviour,
            fleet=fleet,
            leases=state,
            health=Health(),
        )
        closing.push_async_callback(edge.fleet.aclose)
        known(edge)
        await closing.enter_async_context(served(edge))
        if state is not None:
            beats = asyncio.create_task(_beat(state, edge))
            closing.callback(beats.cancel)
        yield Site(world, edge, fleet)


async def _beat(state: RedisState, edge: Edge) -> None:
    while True:
        pulse = await state.beat()
        if pulse is not None:
            edge.scaler.make_room(pulse)
        await state.wait_for_changes(0.1)


@pytest.fixture
async def site(world: World, short_tmp: Path) -> AsyncIterator[Site]:
    async with site_of(world, short_tmp / "a") as made:
        yield made


async def _woken(site: Site, target: Any) -> FakePod:
    """A pod comes because somebody asked for it."""
    await site.world.woken.wait()
    site.world.woken.clear()
    return await site.world.maker.up(target)


async def test_a_call_from_zero_is_answered_by_the_pod_that_it_woke(site: Site) -> None:
    target = site.deploy()
    site.world.server.requests.clear()
    calling = asyncio.create_task(site.call(x=7))
    pod = await _woken(site, target)
    answer = await calling

    assert (answer.status_code, answer.json()) == (200, {"x": 7})
    assert answer.headers["pilotlight-start"] == "COLD"
    assert [
        asked.path
        for asked in site.world.server.requests
        if asked.user_agent and asked.verb not in ("watch", "list")
    ] == []
    assert pod.calls[0].headers["host"]
    warm = await site.call(x=8)
    assert (warm.json(), warm.headers["pilotlight-start"]) == ({"x": 8}, "WARM")


async def test_a_warm_up_brings_a_pod_up_and_says_why_there_is_no_snapshot(site: Site) -> None:
    target = site.deploy()
    warming = asyncio.create_task(site.edge.call("shop/hello:warmup"))
    pod = await _woken(site, target)
    answer = await warming
    assert answer.status_code == 200, answer.text
    assert (answer.json()["start_kind"], "template" in answer.json()) == ("COLD", False)
    assert "agents of the nodes" in answer.json()["snapshot"]["off"]
    assert pod.calls == []


async def test_many_calls_wake_as_many_as_wait(site: Site) -> None:
    target = site.deploy()
    calls = [asyncio.create_task(site.call(x=n)) for n in range(5)]
    await until(lambda: len(site.world.wakes) >= 5)
    await site.world.maker.up(target)
    assert [(await call).json() for call in calls] == [{"x": n} for n in range(5)]


# -- through queue-proxy ---------------------------------------------------------------------------


async def _behind_a_proxy(site: Site, target: Any) -> FakePod:
    maker = site.world.maker
    pod = maker.made(target)
    await maker.boots(pod)
    await maker.serves(pod, ports=(8080,))
    return pod


@contextlib.asynccontextmanager
async def proxied(pod: FakePod) -> AsyncIterator[QueueProxy]:
    proxy = QueueProxy(pod.ip, concurrency=0)
    await proxy.start()
    proxy.is_ready = True
    try:
        yield proxy
    finally:
        await proxy.stop()


async def test_streams_and_their_trailers_pass_through_queue_proxy(site: Site) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for n in range(3):
            yield b"data: %d\n\n" % n

    async def stream(_: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(
            chunks=chunks(), content_type="text/event-stream", trailers=("pilotlight-finish: stop",)
        )

    site.world.maker.behaviour = stream
    target = site.deploy(methods=(MethodSpec(is_generator=True),))
    pod = await _behind_a_proxy(site, target)
    async with proxied(pod):
        answer = await site.edge.call(
            "shop/hello:invoke", json={}, headers={"accept": "text/event-stream"}
        )

    events = [part for part in answer.text.split("\n\n") if part]
    assert events[:3] == ["data: 0", "data: 1", "data: 2"]
    assert '"finish_reason":"stop"' in events[3].replace(" ", "")
    (record,) = (await site.edge.settle()).values()
    assert (record.status, record.outcome, record.finish) == (200, "ok", "stop")


async def test_websockets_pass_through_queue_proxy(site: Site) -> None:
    async def chat(caller: ServerConnection) -> None:
        async for frame in caller:
            await caller.send(frame)

    def status(_: ServerConnection, request: Request) -> Response | None:
        body = json.dumps(
            {"instance": "p", "running": 0, "start_kind": "COLD", "phases_ms": {}}
        ).encode()
        headers = Headers({"content-length": str(len(body)), "connection": "close"})
        return Response(200, "OK", headers, body) if request.path == STATUS else None

    target = site.deploy("site", kind=FunctionKind.ASGI, methods=(MethodSpec(),))
    pod = site.world.maker.made(target)
    await site.world.maker.boots(pod)
    async with serve(chat, pod.ip, 8080, process_request=status), proxied(pod):
        url = f"{site.edge.url.replace('http', 'ws', 1)}/fn/shop/site/chat"
        async with connect(url, additional_headers=HEADERS, proxy=None) as socket:
            await socket.send("hello")
            assert await socket.recv() == "hello"


# -- what goes wrong -------------------------------------------------------------------------------


class Stubborn:
    """A worker that answers once it may. `begun` is set with each call."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()

    async def __call__(self, request: WorkerRequest) -> WorkerAnswer:
        self.begun.set()
        await self.may_end.wait()
        return WorkerAnswer(body=request.body)


async def test_a_call_whose_pod_is_evicted_fails_with_that_word(site: Site) -> None:
    site.world.maker.behaviour = stubborn = Stubborn()
    target = site.deploy()
    pod = await site.world.maker.up(target)
    calling = asyncio.create_task(site.call())
    await stubborn.begun.wait()
    await site.world.maker.evicted(pod)
    answer = await calling
    assert answer.status_code == 502
    assert (answer.json()["reason"], "evicted" in answer.json()["detail"]) == ("evicted", True)


async def test_a_call_of_an_idempotent_function_goes_on_in_another_pod(site: Site) -> None:
    site.world.maker.behaviour = stubborn = Stubborn()
    target = site.deploy(idempotent=True)
    pod = await site.world.maker.up(target)
    calling = asyncio.create_task(site.call(x=3))
    await stubborn.begun.wait()
    other = await site.world.maker.up(target)
    await site.world.maker.evicted(pod)
    stubborn.may_end.set()
    answer = await calling
    assert (answer.status_code, answer.json()) == (200, {"x": 3})
    assert (len(pod.calls), len(other.calls)) == (1, 1)


async def test_a_pod_that_is_asked_to_go_ends_its_calls_and_gets_no_more(site: Site) -> None:
    site.world.maker.behaviour = stubborn = Stubborn()
    target = site.deploy()
    pod = await site.world.maker.up(target)
    calling = asyncio.create_task(site.call(x=1))
    await stubborn.begun.wait()
    await site.world.maker.asked_to_go(pod)
    throttler = site.edge.scaler.active(target.key)
    assert throttler is not None
    await until(lambda: all(instance.is_draining for instance in throttler.instances.values()))

    second = asyncio.create_task(site.call(x=2))
    other = await _woken(site, target)
    stubborn.may_end.set()
    assert [(await call).json() for call in (calling, second)] == [{"x": 1}, {"x": 2}]
    assert (len(pod.calls), len(other.calls)) == (1, 1)


async def test_a_pod_that_nobody_told_us_is_gone_costs_a_retry_and_no_error(site: Site) -> None:
    target = site.deploy()
    pod = await site.world.maker.up(target)
    assert (await site.call()).status_code == 200
    await site.world.maker.dies(pod)
    other = await site.world.maker.up(target)
    answer = await site.call(x=5)
    assert (answer.status_code, answer.json(), len(other.calls)) == (200, {"x": 5}, 1)


async def test_a_pod_that_no_node_takes_is_a_503_with_the_reason_and_when_to_come_back(
    site: Site,
) -> None:
    target = site.deploy()
    calling = asyncio.create_task(site.call())
    await site.world.woken.wait()
    site.world.maker.unschedulable(
        site.world.maker.made(target), "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    )
    answer = await calling
    assert (answer.status_code, answer.headers["retry-after"], answer.json()["resource"]) == (
        503,
        "5",
        "gpu",
    )
    assert "Insufficient nvidia.com/gpu" in answer.json()["detail"]


async def test_a_call_from_zero_while_the_api_server_is_away_is_a_503_with_the_reason(
    site: Site,
) -> None:
    site.deploy()
    async with away(site.world.server):
        answer = await site.call()
    assert answer.status_code == 503, answer.text
    assert "API server has not answered" in answer.json()["detail"]
    assert int(answer.headers["retry-after"]) > 0


async def test_the_call_after_a_crash_waits_for_another_pod(site: Site) -> None:
    target = site.deploy()
    pod = await site.world.maker.up(target)
    assert (await site.call()).status_code == 200
    await site.world.maker.dies(pod)
    site.world.maker.ended(pod, exit_code=137)
    site.world.maker.waiting(pod, "CrashLoopBackOff", restarts=1, last=KILLED)
    calling = asyncio.create_task(site.call())
    await asyncio.sleep(0.5)  # the start that it waits for looks at the pod meanwhile
    await site.world.maker.up(target)
    assert (await calling).status_code == 200


async def test_a_lone_activator_that_was_restarted_takes_back_who_answered_before(
    world: World, short_tmp: Path
) -> None:
    old, new = "v1-aaaaaa", "v2-bbbbbb"
    target = target_of(spec_of(), revision=old)
    world.targets[target.key] = target
    await world.maker.up(target)

    def known(edge: Edge) -> None:
        edge.table.handovers = edge.handovers
        told = {"previous": {old: 100}, "awaited": (new,)}
        edge.add(split_route(spec_of(), {new: 100}, named=(old,), **told))

    async with site_of(world, short_tmp / "a", known=known) as site:
        await site.edge.scaler.reconciled.wait()
        answers = [await site.call() for _ in range(3)]  # no pod of the new one ever comes
    assert [one.headers["pilotlight-revision"] for one in answers] == [old] * 3


async def test_an_image_that_cannot_be_pulled_is_a_503_with_the_reason(site: Site) -> None:
    target = site.deploy()
    calling = asyncio.create_task(site.call())
    await site.world.woken.wait()
    site.world.maker.waiting(
        site.world.maker.made(target),
        "ImagePullBackOff",
        'Back-off pulling image "registry.example/fn"',
    )
    answer = await calling
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert "registry.example/fn" in answer.json()["detail"]


# -- several activators ----------------------------------------------------------------------------


async def test_an_activator_without_a_pod_is_given_the_one_that_another_does_not_need(
    world: World, short_tmp: Path, redis_url: str
) -> None:
    platform = uuid.uuid4().hex[:8]
    async with (
        site_of(world, short_tmp / "a", "a-0", redis_url, platform) as one,
        site_of(world, short_tmp / "b", "a-1", redis_url, platform) as two,
    ):
        for site in (one, two):
            target = site.deploy()
        pod = await world.maker.up(target)
        assert (await one.call(x=1)).json() == {"x": 1}
        assert (await two.call(x=2)).json() == {"x": 2}
        assert (await one.call(x=3)).json() == {"x": 3}
        assert len(pod.calls) == 3
        holders = [site for site in (one, two) if site.fleet.claimed.by_uid()]
        assert len(holders) == 1


async def test_when_an_activator_is_gone_the_others_take_its_pods(
    world: World, short_tmp: Path, redis_url: str
) -> None:
    platform = uuid.uuid4().hex[:8]
    async with site_of(world, short_tmp / "b", "a-1", redis_url, platform) as two:
        target = two.deploy()
        async with site_of(world, short_tmp / "a", "a-0", redis_url, platform) as one:
            one.deploy()
            await world.maker.up(target)
            assert (await one.call(x=1)).json() == {"x": 1}
            state = RedisState(redis_url, platform=platform, member="a-0")
            await state.aclose()  # leaves, as its time to live would
            assert (await two.call(x=2)).json() == {"x": 2}
