"""A catalogue on a temporary directory, and snapshots that look like CRIU's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from snapshotter.snapshots.catalog import Catalog
from tests.snapshotter.snapshots import shapes


@pytest.fixture
async def catalogue(tmp_path: Path) -> AsyncIterator[Catalog]:
    catalogue = Catalog(tmp_path / "snapshots", key=shapes.KEY, max_bytes=10_000_000)
    yield catalogue
    await catalogue.aclose()
