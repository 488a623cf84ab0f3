"""A weight cache of one node, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.weight_cache.served import Cache, Node, node_with_client
from weight_cache.client import WeightCacheClient


@pytest.fixture
async def served() -> AsyncIterator[tuple[Node, Cache, WeightCacheClient]]:
    async with node_with_client() as found:
        yield found


@pytest.fixture
def node(served: tuple[Node, Cache, WeightCacheClient]) -> Node:
    return served[0]


@pytest.fixture
def client(served: tuple[Node, Cache, WeightCacheClient]) -> WeightCacheClient:
    return served[2]
