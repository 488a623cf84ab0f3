"""Quotas over real HTTP where they are counted in a real Redis: the same answers, another way
through the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from activator.access.grants import AccessCache
from activator.quotas.redis_store import RedisQuotas
from activator.quotas.store_protocol import QuotaCheck, QuotaStore
from activator.settings import ActivatorSettings
from pilotlight.spec.instances.scaling import Scaling
from tests.activator.conftest import KEY, Edge
from tests.activator.test_gateway import forever, problem_of, until
from tests.fakes.fake_worker import Script
from tests.fakes.redis_server import RedisLink, scripts_run
from tests.fakes.routes import TENANT, route_of, spec_of


@pytest.fixture(name="settings")
def _settings() -> ActivatorSettings:
    return ActivatorSettings(
        without_redis={"concurrent": "closed"}, redis_url="redis://unused", quota_store="redis"
    )


@pytest.fixture(name="redis_link")
def _redis_link(short_tmp: Path, redis_url: str) -> RedisLink:
    return RedisLink(short_tmp, redis_url)


@pytest.fixture(name="quota_store")
async def _quota_store(
    settings: ActivatorSettings, redis_link: RedisLink
) -> AsyncIterator[QuotaStore]:
    store = RedisQuotas(
        redis_link.url, platform="p", member="a-0", is_open=settings.is_open_without_redis
    )
    yield store
    await store.aclose()


@pytest.fixture(name="other")
async def _other(settings: ActivatorSettings, redis_url: str) -> AsyncIterator[RedisQuotas]:
    """Another activator's store."""
    store = RedisQuotas(
        redis_url, platform="p", member="a-1", is_open=settings.is_open_without_redis
    )
    yield store
    await store.aclose()


@pytest.fixture(name="shop")
async def _shop(edge: Edge) -> Edge:
    edge.add(route_of(spec_of(scaling=Scaling(max_inputs=8))))
    await edge.call(json={"x": 0})
    return edge


def elsewhere(edge: Edge, other: RedisQuotas) -> QuotaCheck:
    """The same caller at the same function, at the other activator."""
    caller = edge.table.authenticate(f"Bearer {KEY}".encode(), 0.0)
    access = AccessCache(table=edge.table, store=other, settings=ActivatorSettings())
    quota_check = access.entry(
        caller, edge.table.targets_of(f"{TENANT}/main/shop/hello")[0]
    ).quota_check
    assert quota_check is not None
    return quota_check


async def test_both_activators_grant_the_quota_together_and_say_so(
    shop: Edge, other: RedisQuotas
) -> None:
    shop.add_tenant("acme", requests_per_s=0.001, burst=4, concurrent=3)
    there = elsewhere(shop, other)
    assert [await there.try_acquire(1, 1, 0) for _ in range(2)] == [None, None]

    first = await shop.call(json={"x": 1})
    assert first.status_code == 200
    assert first.headers["ratelimit"].startswith('"tenant";r=1;t=')
    assert first.headers["ratelimit"].endswith('"tenant-concurrent";r=0')
    assert (await shop.call(json={"x": 1})).status_code == 200
    over = await shop.call(json={"x": 1})
    assert (over.status_code, problem_of(over)["quota"]) == (429, "requests_per_s")
    assert int(over.headers["retry-after"]) > 900


async def test_so_many_run_at_once_over_all_activators(
    shop: Edge, other: RedisQuotas, script: Script
) -> None:
    shop.add_tenant("acme", concurrent=2)
    script.now = forever
    running = [asyncio.create_task(shop.call(json={"x": n})) for n in range(2)]
    await until(lambda: shop.quotas.held(f"tenant:{TENANT}") == 2)
    there = elsewhere(shop, other)
    refusal = await there.try_acquire(1, 1, 0)
    assert refusal is not None
    assert refusal.quota == "concurrent"
    for call in running:
        call.cancel()
    await until(lambda: shop.quotas.held(f"tenant:{TENANT}") == 0)
    assert isinstance(shop.quotas, RedisQuotas)
    await shop.quotas.flush()
    assert await there.try_acquire(1, 1, 0) is None


async def test_without_a_rule_a_call_stays_warm_and_redis_is_not_asked(
    shop: Edge, redis_url: str
) -> None:
    def is_warm() -> bool:
        path, key = b"/v1/functions/shop/hello:invoke", f"Bearer {KEY}".encode()
        return shop.gateway.find_warm(path, {b"authorization": key}) is not None

    before = scripts_run(redis_url)
    assert (await shop.call(json={"x": 1})).headers["pilotlight-start"] == "WARM"
    assert is_warm()
    assert scripts_run(redis_url) == before

    shop.add_tenant("acme", requests_per_s=5)
    assert (await shop.call(json={"x": 1})).status_code == 200
    assert not is_warm()


async def test_while_redis_is_away_what_is_open_goes_on_and_what_is_closed_is_503(
    shop: Edge, redis_link: RedisLink
) -> None:
    shop.add_tenant("acme", requests_per_s=0.001, burst=2)
    redis_link.cut()
    open_ = [await shop.call(json={"x": 1}) for _ in range(3)]
    assert [a.status_code for a in open_] == [200, 200, 429]  # counted here

    shop.add_tenant("acme", concurrent=5)
    closed: httpx.Response = await shop.call(json={"x": 1})
    assert (closed.status_code, closed.headers["retry-after"]) == (503, "2")
    assert "without_redis" in str(problem_of(closed)["detail"])
