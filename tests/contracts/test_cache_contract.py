"""What the controller relies on when it asks a weight cache: true of the real one on its socket,
and of the small one its tests use."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes.small_cache import SIZE_BYTES, SmallCache
from tests.fakes.trees import remove_tree
from tests.weight_cache.models import put_model
from tests.weight_cache.served import node_with_client
from weight_cache.client import WeightCacheClient
from weight_cache.errors import OriginUnavailable
from weight_cache.types import LoadProgress, Tier


@dataclass(frozen=True)
class Asked:
    """A cache: its client, a model that can be fetched, one that cannot."""

    client: WeightCacheClient
    model: str
    missing: str = "ab" * 32


@contextlib.asynccontextmanager
async def real() -> AsyncIterator[Asked]:
    async with node_with_client() as (node, _, client):
        yield Asked(client, put_model(node.origin, {"w.bin": b"x" * SIZE_BYTES}))


@contextlib.asynccontextmanager
async def small() -> AsyncIterator[Asked]:
    home = Path(tempfile.mkdtemp(prefix="pl"))
    asked = Asked(WeightCacheClient(home / "s"), "cd" * 32)
    cache = SmallCache(absent={asked.missing})
    server = await cache.serve(home / "s")
    yield asked
    await asked.client.aclose()
    server.close()
    remove_tree(home)


@pytest.fixture(name="asked", params=[real, small])
async def _asked(request: pytest.FixtureRequest) -> AsyncIterator[Asked]:
    async with request.param() as asked:
        yield asked


async def test_what_is_not_here_is_at_the_origin_and_asking_about_it_is_harmless(
    asked: Asked,
) -> None:
    found = await asked.client.predict(asked.model)
    assert (found.tier, found.seconds) == (Tier.ORIGIN, None)
    assert await asked.client.verify(asked.model) == []
    assert await asked.client.drop(asked.model) is False
    await asked.client.unpin(asked.model)
    assert await asked.client.models() == []
    assert (await asked.client.stat()).models == 0


async def test_a_prefetch_tells_how_far_it_is_and_then_the_model_is_here(asked: Asked) -> None:
    told: list[LoadProgress] = []
    await asked.client.prefetch(asked.model, on_progress=told.append)

    assert {progress.total_bytes for progress in told} <= {SIZE_BYTES}
    (model,) = await asked.client.models()
    assert (model.manifest, model.size_bytes, model.files, model.leases, model.is_pinned) == (
        asked.model,
        SIZE_BYTES,
        1,
        0,
        False,
    )
    found = await asked.client.predict(asked.model)
    assert found.tier in (Tier.NVME, Tier.DRAM)
    assert found.seconds is not None
    assert await asked.client.verify(asked.model) == []


async def test_what_is_pinned_stays_until_it_is_unpinned(asked: Asked) -> None:
    await asked.client.pin(asked.model)
    assert [model.is_pinned for model in await asked.client.models()] == [True]
    assert await asked.client.drop(asked.model) is False

    await asked.client.unpin(asked.model)
    assert [model.is_pinned for model in await asked.client.models()] == [False]
    assert await asked.client.drop(asked.model) is True
    assert await asked.client.models() == []


async def test_what_cannot_be_fetched_is_refused_by_its_kind(asked: Asked) -> None:
    for ask in (asked.client.prefetch, asked.client.pin):
        with pytest.raises(OriginUnavailable):
            await ask(asked.missing)
    assert await asked.client.models() == []
