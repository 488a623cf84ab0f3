"""A cluster for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.small_cluster import World, small_cluster


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """An API server, and pods as the test makes them."""
    async with small_cluster(tmp_path) as made:
        yield made
