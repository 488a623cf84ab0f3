"""A small cluster with a pool of warm pods."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.small_cluster import World, small_cluster
from tests.fakes.warm_pool import WarmPool


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """An API server, and pods as the test makes them."""
    async with small_cluster(tmp_path) as made:
        yield made


@pytest.fixture
async def pool(world: World, short_tmp: Path) -> AsyncIterator[WarmPool]:
    """The controller's part, and no pods yet."""
    made = await WarmPool(world, short_tmp / "controller.sock").start()
    yield made
    await made.aclose()
