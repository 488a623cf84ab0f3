"""What contract tests of the control plane share: its store on both databases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotlight.controller.store import Store
from tests.functions.controller.parts import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'controller.db'}"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def store(url: str, clock: ManualClock) -> Iterator[Store]:
    opened = Store(url, clock=clock)
    opened.migrate()
    yield opened
    opened.close()
