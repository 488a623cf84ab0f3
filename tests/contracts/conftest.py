"""What contract tests share: the control plane's store on both databases, and patience with
Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from activator.coordination import redis_client, redis_state
from activator.knative.leases import redis_pod_leases
from pilotlight.controller.database.store import Store
from pilotlight.controller.server import bootstrap
from pilotlight.core.object_store import DirectoryStore, ObjectStore
from tests.fakes.databases import empty_sqlite
from tests.functions.controller.conftest import Controller, running_controller
from tests.functions.controller.parts import ManualClock


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stall of a busy machine is not a Redis that is away, and outlasts no refusal."""
    monkeypatch.setattr(redis_client, "ANSWER_S", 30.0)
    for module in (redis_pod_leases, redis_state):
        monkeypatch.setattr(module, "REFUSAL_S", 60.0)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'controller.db'}"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture(params=["sqlite", "postgresql"])
def migrated_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where the tables of the store are made already."""
    return str(
        empty_sqlite(tmp_path / "controller.db")
        if request.param == "sqlite"
        else request.getfixturevalue("migrated_postgres")
    )


@pytest.fixture
def store(migrated_url: str, clock: ManualClock) -> Iterator[Store]:
    opened = Store(migrated_url, clock=clock)
    yield opened
    opened.close()


@pytest.fixture
def blobs(tmp_path: Path) -> ObjectStore:
    """What the `controller` stores objects in."""
    return DirectoryStore(tmp_path / "blobs")


@pytest.fixture
async def controller(
    migrated_url: str, clock: ManualClock, blobs: ObjectStore, tmp_path: Path, short_tmp: Path
) -> AsyncIterator[Controller]:
    """A controller on a database of each kind."""
    store = Store(migrated_url, clock=clock)
    key = bootstrap.ensure_admin(store, uid_base=20_000)
    store.close()
    assert key is not None
    async with running_controller(
        clock=clock, blobs=blobs, home=tmp_path, run=short_tmp, database=(migrated_url, key)
    ) as found:
        yield found
