"""A control plane for commands, over a copy of a migrated database."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotlight.controller.database.store import Store
from tests.fakes.served_controller import ServedController


@pytest.fixture(scope="session", name="database")
def _database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database: copied by tests, because migrating takes longer than most of them."""
    path = tmp_path_factory.mktemp("empty") / "controller.db"
    store = Store(f"sqlite:///{path}", clock=lambda: 0.0)
    store.migrate()
    store.close()
    return path


@pytest.fixture(name="served")
def _served(database: Path, tmp_path: Path) -> Iterator[ServedController]:
    """The real control plane, in this process."""
    for file in database.parent.iterdir():  # with its log, if SQLite left one
        shutil.copy(file, tmp_path)
    with ServedController(tmp_path) as platform:
        yield platform
