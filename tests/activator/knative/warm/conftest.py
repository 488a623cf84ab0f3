"""A small cluster with a pool of warm pods."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.small_cluster import World
from tests.fakes.warm_pool import WarmPool


@pytest.fixture
async def pool(world: World, short_tmp: Path) -> AsyncIterator[WarmPool]:
    """The controller's part, and no pods yet."""
    made = await WarmPool(world, short_tmp / "controller.sock").start()
    yield made
    await made.aclose()
