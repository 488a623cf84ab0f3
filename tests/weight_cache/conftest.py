"""A weight cache of one node, and a client of it."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.fakes.trees import remove_tree
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


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short: Unix sockets allow 107 bytes."""
    made = Path(tempfile.mkdtemp(prefix="pl"))
    yield made
    remove_tree(made)
