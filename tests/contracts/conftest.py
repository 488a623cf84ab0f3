"""What contract tests of the control plane share: its store on both databases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotlight.controller.store import Store
from tests.fakes.databases import empty_sqlite
from tests.functions.controller.parts import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'controller.db'}"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    is_sqlite = request.param == "sqlite"
    opened = Store(empty_sqlite(tmp_path / "controller.db") if is_sqlite else request.getfixturevalue("migrated_postgres"), clock=clock)
    yield opened
    opened.close()
