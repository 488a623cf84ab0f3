"""Proofs of response caches: through an activator, and through what its process makes of its
settings."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from activator.billing.budgets.budgets import Budgets
from activator.calls.response_store import OVERHEAD_BYTES
from activator.response_cache import redis_store
from activator.response_cache.cache_hits import CacheHitAccount
from activator.settings import ActivatorSettings
from pilotlight.spec.policies import MIN_CACHE_BYTES, ResponseCacheSpec
from pilotlight.spec.pricing import Rates
from tests.activator.conftest import Edge, served
from tests.activator.response_cache.test_cache_hits import HIT, opened, target_of
from tests.activator.response_cache.test_cached_calls import Counting, told
from tests.activator.response_cache.test_redis_store import store_at
from tests.activator.test_gateway import until
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.routes import route_of, spec_of
from tests.options.contract import proves
from tests.options.test_activator_settings import REDIS, app_of
from tests.options.test_prices import lists_of


@proves("ResponseCacheSpec.ttl_s")
async def test_answers_are_as_old_as_declared(fleet: str, edge: Edge) -> None:
    edge.add(route_of(spec_of(cache=ResponseCacheSpec(ttl_s=5))))
    edge.add(route_of(spec_of("plain")))
    found = []
    for later_s in (0.0, 4.0, 6.0):
        edge.later_s = later_s
        found.append(told(await edge.call(json={"x": 1}))[2])
    assert found == ["miss", "hit", "miss"]
    assert told(await edge.call("shop/plain:invoke", json={"x": 1}))[2] is None


@proves("ResponseCacheSpec.max_bytes")
async def test_a_function_has_the_memory_that_is_declared(fleet: str, edge: Edge) -> None:
    async def large(request: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(body=b"1" * (200 * 1024))

    for name, size in (("small", MIN_CACHE_BYTES), ("large", 4 * MIN_CACHE_BYTES)):
        edge.fleet.behaviours[name] = large
        edge.add(route_of(spec_of(name, cache=ResponseCacheSpec(ttl_s=60, max_bytes=size))))
        for number in range(12):
            await edge.call(f"shop/{name}:invoke", json={"x": number})
    small, large_ = (
        edge.answers.sizes()[f"t-000000000001/main/shop/{name}"] // (200 * 1024)
        for name in ("small", "large")
    )
    assert (small, large_) == (5, 12)
    assert OVERHEAD_BYTES < 1024


@proves("ResponseCacheSpec.shared")
async def test_answers_are_shared_as_declared(
    fleet: str, redis_url: str, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "FIND_S", 30.0)  # a busy machine is no Redis that is away
    found = {}
    for shared in (True, False):
        runs = Counting()
        for place in ("a", "b"):
            directory = short_tmp / f"{place}{shared:d}"
            directory.mkdir()
            store = store_at(redis_url, platform=f"p{shared:d}")
            async with served(Edge(directory, ActivatorSettings(), runs, shared=store)) as edge:
                edge.add(route_of(spec_of(cache=ResponseCacheSpec(ttl_s=60, shared=shared))))
                found[shared, place] = told(await edge.call(json={"x": 1}))[2]
                await until(lambda store=store: " 0 on their way" in repr(store))
            await store.aclose()
    assert (found[True, "b"], found[False, "b"]) == ("hit", "miss")


@proves("ActivatorSettings.response_cache_bytes")
async def test_all_answers_have_a_bound(fleet: str, short_tmp: Path) -> None:
    async with app_of(short_tmp, fleet, response_cache_bytes=3 << 20) as app:
        assert f"0/{3 << 20} bytes" in repr(app.cached)
        assert f"0/{3 << 20} bytes" in repr(app.runner.fallbacks), "one store for both"
        assert repr(app.cached).endswith("None>")
    with pytest.raises(ValueError, match="response_cache_bytes"):
        ActivatorSettings(response_cache_bytes=1000)


@proves("ActivatorSettings.response_cache_redis_bytes")
async def test_shared_answers_have_a_bound_in_redis(fleet: str, short_tmp: Path) -> None:
    shared: dict[str, Any] = {"redis_url": REDIS, "quota_store": "redis"}
    async with app_of(short_tmp, fleet, **shared, response_cache_redis_bytes=5 << 20) as app:
        assert f"at most {5 << 20} bytes" in repr(app.cached)


@proves("PriceSettings.cache_hit")
def test_a_hit_costs_what_the_list_says(fleet: str, tmp_path: Path) -> None:

    rates: Rates = lists_of(tmp_path, 'cache_hit: "0.25", request: "7"').rates()
    journal = opened(tmp_path / "journal")
    charge = CacheHitAccount(journal, Budgets()).charge(target_of(rates), HIT)
    assert Decimal(charge.cost) == Decimal("0.25")
    journal.close()
