"""`python -m activator` on a cluster: it comes up, says when it is ready, serves from pods, and
leaves in order."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from activator.coordination.redis_state import RedisState
from activator.coordination.state import platform_id
from activator.knative.leases.redis_pod_leases import RedisPodLeases
from pilotlight.core.crypto import ActivatorKey
from pilotlight.kubernetes.names import revision_name, service_name, tenant_namespace
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.protocol import DUE_PATH, FEED_PATH, FeedChange
from pilotlight.spec.instances.scaling import Scaling
from tests.activator.conftest import KEY
from tests.fakes.fake_worker import FakeWorker, WorkerAnswer, WorkerRequest
from tests.fakes.plain_http import NO_TLS
from tests.fakes.ports import free_port
from tests.fakes.routes import TENANT, change, route_of, spec_of
from tests.fakes.small_cluster import World

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[3]
WAIT_S = 60.0


class FeedDesk:
    """The controller: tells its feed once, and takes whatever is posted."""

    def __init__(self, path: Path, changes: list[FeedChange]) -> None:
        self.server = FakeWorker(path, self._answer)
        self._changes = [asdict(one) for one in changes]

    async def _answer(self, request: WorkerRequest) -> WorkerAnswer:
        if request.path.startswith(FEED_PATH):
            if f"after={len(self._changes)}" in request.path:
                await asyncio.sleep(0.2)
                return _said({"seq": len(self._changes), "reset": False, "changes": []})
            return _said({"seq": len(self._changes), "reset": True, "changes": self._changes})
        if request.path.startswith(DUE_PATH) and request.method == "GET":
            await asyncio.sleep(0.5)
            return _said({"calls": []})
        return _said({"accepted": 1, "budgets": {}, "yours": []})


def _said(body: dict[str, Any]) -> WorkerAnswer:
    return WorkerAnswer(body=json.dumps(body).encode())


@contextlib.asynccontextmanager
async def controller(home: Path, changes: list[FeedChange]) -> AsyncIterator[FeedDesk]:
    """At the socket where an activator of `home` looks for it."""
    (home / "run").mkdir()
    desk = FeedDesk(home / "run" / "controller.sock", changes)
    await desk.server.start()
    try:
        yield desk
    finally:
        await desk.server.aclose()


class Running:
    """One activator's process."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url
        self.client = httpx.AsyncClient(verify=NO_TLS, timeout=WAIT_S)

    async def probe(self, path: str) -> int:
        """The status of `/healthz` or `/readyz`; 0 while nobody answers."""
        try:
            return (await self.client.get(f"{self.url}{path}")).status_code
        except httpx.TransportError:
            return 0

    async def until(self, path: str, status: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while await self.probe(path) != status:
                assert self.process.returncode is None
                await asyncio.sleep(0.02)

    async def call(self, function: str, x: int) -> httpx.Response:
        headers = {"authorization": f"Bearer {KEY}"}
        return await self.client.post(
            f"{self.url}/v1/functions/shop/{function}:invoke", json={"x": x}, headers=headers
        )


@contextlib.asynccontextmanager
async def activator(world: World, home: Path, redis_url: str) -> AsyncIterator[Running]:
    """Ready, until the context ends."""
    port = free_port()
    ActivatorKey(os.urandom(32)).write(home / "activator.key")
    config = home / "platform.yaml"
    sections = {
        "platform": {"home": str(home), "run": str(home / "run"), "fleet": "knative"},
        "cluster": {
            "kubeconfig": str(world.server.write_kubeconfig(home / "kubeconfig")),
            "wake_url": world.wake_url,
        },
        "activator": {
            "listen": f"127.0.0.1:{port}",
            "metrics_listen": None,
            "activators": 2,
            "redis_url": redis_url,
            "drain_s": 4.0,
            "shutdown_s": 4.0,
        },
    }
    config.write_text(yaml.safe_dump(sections))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'functions'}"}
    argv = (sys.executable, "-m", "activator", "--config", str(config), "--index", "0")
    with (home / "activator.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*argv, env=environment, stderr=log)
    running = Running(process, f"http://127.0.0.1:{port}")
    try:
        await running.until("/readyz", 200)
        yield running
    finally:
        if process.returncode is None:
            print((home / "activator.log").read_text())  # shown where the test fails
            process.kill()
        await process.wait()
        await running.client.aclose()


def _place(target: Any) -> tuple[str, str]:
    settings = ClusterSettings()
    name = revision_name(service_name(target.app, target.function), target.revision)
    return tenant_namespace(settings, "acme", target.environment), name


class Held:
    """Calls of `slow` end when they may."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()

    async def __call__(self, request: WorkerRequest) -> WorkerAnswer:
        if b'"x":1}' in request.body.replace(b" ", b""):
            self.begun.set()
            await self.may_end.wait()
        return WorkerAnswer(body=request.body)


async def test_it_serves_from_pods_and_leaves_without_cutting_anybody_off(
    world: World, short_tmp: Path, redis_url: str
) -> None:
    slow, quick = spec_of("slow", scaling=Scaling(max_inputs=1, max_instances=1)), spec_of("quick")
    key = {
        "id": "k-1",
        "hash": hashlib.sha256(KEY.encode()).hexdigest(),
        "tenant": TENANT,
        "scope": "deploy",
    }
    changes = [
        FeedChange(
            seq=1,
            kind="tenant",
            key=TENANT,
            value={"id": TENANT, "name": "acme", "uid": None, "plan": {}, "suspended": False},
        ),
        FeedChange(seq=2, kind="key", key="k-1", value=key),
        change(3, route_of(slow)),
        change(4, route_of(quick)),
    ]
    world.maker.behaviour = held = Held()
    targets = {name: world.target(name) for name in ("slow", "quick")}
    async with controller(short_tmp, changes), activator(world, short_tmp, redis_url) as running:
        first = asyncio.create_task(running.call("slow", 1))
        await world.woken.wait()
        assert world.wakes[0] == _place(targets["slow"])
        pods = {name: await world.maker.up(target) for name, target in targets.items()}
        await held.begun.wait()
        assert (await running.call("quick", 2)).json() == {"x": 2}
        waiting = asyncio.create_task(running.call("slow", 3))

        running.process.send_signal(signal.SIGTERM)
        await running.until("/readyz", 503)
        assert await running.probe("/healthz") == 200
        assert (await running.call("quick", 4)).json() == {"x": 4}, (
            "who does not know yet is served"
        )

        refused = await waiting
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        held.may_end.set()
        assert (await first).json() == {"x": 1}
        async with asyncio.timeout(WAIT_S):
            assert await running.process.wait() == 0

    assert len(pods["quick"].calls) == 2
    platform = platform_id(ActivatorKey.load(short_tmp / "activator.key").token)
    state, claims = (
        make(redis_url, platform=platform, member="a-1") for make in (RedisState, RedisPodLeases)
    )
    await state.join()  # type: ignore[union-attr]
    life = f"{pods['quick'].uid}.0"
    assert (
        await claims.claim(targets["quick"].key, f"i-{uuid.uuid4().hex[:16]}", [life], pods=1)  # type: ignore[union-attr]
        == life
    ), "its pods are free at once"
    for each in (state, claims):
        await each.aclose()
