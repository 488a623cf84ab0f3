"""The real CRIU, proven once per boot, and a catalogue of snapshots."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from snapshotter.client import AgentClient
from snapshotter.criu.processes import Criu
from snapshotter.criu.self_test import SelfTest, self_test
from snapshotter.snapshots import fetches
from snapshotter.snapshots.catalog import Catalog
from snapshotter.snapshots.selector import SnapshotSelector
from snapshotter.starts import strategy
from snapshotter.types import LaunchSpec
from tests.conftest import RequireOrSkip
from tests.fakes.agent_home import CRIU_CACHE, AgentHome
from tests.fakes.slot_workshop import Workshop, workshop
from tests.snapshotter.snapshots import shapes


@pytest.fixture(scope="session")
def criu_proof(require_or_skip: RequireOrSkip) -> SelfTest:
    """CRIU as its self test found it. Without one that works the test is skipped, and fails in
    CI."""
    found = asyncio.run(self_test(cache=CRIU_CACHE, environ=os.environ))
    if not found.on:
        require_or_skip(found.why)
    return found


@pytest.fixture
def patient_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents in this process give a RESTORE more than 2 s before they start COLD, and a transfer
    more than half a second: a busy machine may take longer. They expect a COLD start to take much
    longer than a RESTORE, which on a busy machine is not so for the small functions of tests."""
    expected = SnapshotSelector.known_cold_ms

    def cold_ms(self: SnapshotSelector, launch: LaunchSpec) -> float:
        return max(20_000.0, expected(self, launch) or 0.0)

    monkeypatch.setattr(SnapshotSelector, "known_cold_ms", cold_ms)
    monkeypatch.setattr(strategy, "_FLOOR_S", 20.0)
    monkeypatch.setattr(fetches, "PATIENCE_S", 20.0)


@pytest.fixture
def criu(criu_proof: SelfTest) -> Criu:
    """What `snapshotter.criu.operations` wants."""
    return criu_proof.criu()


@pytest.fixture
def home(short_tmp: Path) -> AgentHome:
    """A node agent's home."""
    return AgentHome(short_tmp)


@pytest.fixture
async def shop(short_tmp: Path, criu: Criu, criu_proof: SelfTest) -> AsyncIterator[Workshop]:
    """Slots with the real CRIU."""
    async with workshop(AgentHome(short_tmp), criu, criu_proof.kdat) as shop:
        yield shop


@pytest.fixture
async def catalogue(tmp_path: Path) -> AsyncIterator[Catalog]:
    """A catalogue on a temporary directory."""
    catalogue = Catalog(tmp_path / "snapshots", key=shapes.KEY, max_bytes=10_000_000)
    yield catalogue
    await catalogue.aclose()


@pytest.fixture
async def client(home: AgentHome) -> AsyncIterator[AgentClient]:
    """Of an agent that makes snapshots."""
    async with home.agent(snapshots=True), home.client() as client:
        yield client
