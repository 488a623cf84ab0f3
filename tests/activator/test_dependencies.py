"""Rows of docs/reference/dependencies.md that an activator sees: each is really taken away, and what the row
says is looked at."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis

from activator.balancing.fleet import NodeFleet
from activator.quotas.redis_store import RedisQuotas
from activator.quotas.store_protocol import QuotaStore
from activator.resilience.node_breaker import AWAY_S, NodeBreaker
from activator.settings import ActivatorSettings
from activator.tracing.otlp import OtlpExport
from pilotlight.spec.policies import Fallback
from tests.activator.conftest import Edge
from tests.activator.test_gateway import problem_of, until
from tests.conftest import RequireOrSkip
from tests.fakes.routes import route_of, spec_of

PATIENCE_S = 30.0


class OwnRedis:
    """A Redis for one test, which ends it."""

    def __init__(self, program: str, home: Path) -> None:
        arguments = [
            "--port",
            "0",
            "--unixsocket",
            str(home / "r.sock"),
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            str(home),
        ]
        self.url = f"unix://{home}/r.sock?db=0"
        self._process = subprocess.Popen(
            [program, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    async def wait_up(self) -> None:
        """Until it answers."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                with redis.Redis.from_url(self.url) as client:
                    client.ping()
                return
            except redis.RedisError:
                assert time.monotonic() < until_s
                await asyncio.sleep(0.02)

    def kill(self) -> None:
        """As a machine that loses power."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(PATIENCE_S)


class TestRedis:
    """Two kinds of bounds, one open and one closed without it."""

    @pytest.fixture(name="settings")
    def _settings(self) -> ActivatorSettings:
        return ActivatorSettings(
            without_redis={"concurrent": "closed"}, redis_url="redis://unused", quota_store="redis"
        )

    @pytest.fixture(name="own_redis")
    async def _own_redis(
        self, short_tmp: Path, require_or_skip: RequireOrSkip
    ) -> AsyncIterator[OwnRedis]:
        program = shutil.which("redis-server")
        if program is None:
            require_or_skip("redis-server is not installed (scripts/install-system-packages test)")
        own = OwnRedis(program, short_tmp)
        await own.wait_up()
        yield own
        own.kill()

    @pytest.fixture(name="quota_store")
    async def _quota_store(
        self, settings: ActivatorSettings, own_redis: OwnRedis
    ) -> AsyncIterator[QuotaStore]:
        store = RedisQuotas(
            own_redis.url, platform="p", member="a-0", is_open=settings.is_open_without_redis
        )
        yield store
        await store.aclose()

    async def test_without_redis_open_bounds_are_counted_here_and_closed_ones_are_503(
        self, edge: Edge, own_redis: OwnRedis
    ) -> None:
        edge.add(route_of(spec_of("plain")))
        edge.add_tenant("acme", requests_per_s=0.001, burst=5)
        assert (await edge.call("shop/plain:invoke", json={"x": 1})).status_code == 200
        own_redis.kill()

        answers = [await edge.call("shop/plain:invoke", json={"x": 1}) for _ in range(6)]
        assert [answer.status_code for answer in answers] == [200] * 4 + [429] * 2, (
            "what was taken before is remembered"
        )

        edge.add_tenant("acme", concurrent=5)
        closed = await edge.call("shop/plain:invoke", json={"x": 1})
        assert closed.status_code == 503
        assert int(closed.headers["retry-after"]) >= 1
        assert "redis" in str(problem_of(closed)["detail"]).lower()


async def test_without_the_node_agent_calls_wait_for_a_while_and_then_fall_back_at_once(
    edge: Edge, short_tmp: Path
) -> None:
    clock = {"now": 100.0}
    agentless = NodeFleet(
        socket=short_tmp / "nobody.sock",
        lessee="a-0",
        guard=NodeBreaker(clock=lambda: clock["now"]),
    )
    edge.add(route_of(spec_of(fallback=(Fallback(kind="static", body="sorry"),))))
    edge.add(route_of(spec_of("plain")))
    edge.add(route_of(spec_of("warm")))
    await edge.call("shop/warm:invoke", json={"x": 0})
    own, edge.provisioner.fleet = edge.provisioner.fleet, agentless
    try:
        waiting = asyncio.create_task(edge.call(json={"x": 1}))
        await until(lambda: edge.queue.waiting == 1)
        assert (await edge.call("shop/warm:invoke", json={"x": 2})).json() == {"x": 2}
        assert not waiting.done()

        clock["now"] += AWAY_S
        answer = await asyncio.wait_for(waiting, PATIENCE_S)
        assert (answer.json(), answer.headers["pilotlight-degraded"]) == ("sorry", "static")
        refused = await edge.call("shop/plain:invoke", json={"x": 1})
        problem = problem_of(refused)
        assert (refused.status_code, str(problem["type"]).rpartition("/")[2]) == (
            503,
            "circuit-open",
        )
        assert "the node agent has not answered" in str(problem["detail"])
        assert int(refused.headers["retry-after"]) >= 1
    finally:
        edge.provisioner.fleet = own
        await agentless.aclose()


async def test_without_the_collector_calls_are_answered_and_lost_traces_are_counted(
    edge: Edge,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = f"http://127.0.0.1:{listener.getsockname()[1]}"
    export = OtlpExport(nobody, instance="a-0", max_held=2, timeout_s=0.2, pause_s=3600.0)
    edge.keep = export.put
    edge.add(route_of(spec_of()))
    sampled = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    for x in range(5):
        assert (await edge.call(json={"x": x}, headers=sampled)).json() == {"x": x}
    await asyncio.to_thread(export.close)

    assert (export.exported, export.dropped) == (0, 5)
