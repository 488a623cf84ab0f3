"""Processes of one of the two fleets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from pilotlight.core.object_store import DirectoryStore
from pilotlight.core.settings import PlatformSettings
from tests.activator.conftest import Edge
from tests.functions.controller.conftest import Controller, running_controller
from tests.functions.controller.parts import ManualClock
from tests.options.contract import CLUSTER
from tests.options.world import SETTINGS, serving


@pytest.fixture
async def edge(fleet: str, short_tmp: Path) -> AsyncIterator[Edge]:
    """An activator with the fleet's limits."""
    async with serving(short_tmp, fleet) as found:
        yield found


@pytest.fixture
async def controller(fleet: str, tmp_path: Path, short_tmp: Path) -> AsyncIterator[Controller]:
    """A controller of that fleet."""
    blobs = DirectoryStore(tmp_path / "blobs")
    async with running_controller(
        clock=ManualClock(), blobs=blobs, home=tmp_path, run=short_tmp
    ) as found:
        if fleet == CLUSTER:
            config = replace(
                found.context.config, platform=PlatformSettings(fleet="knative"), cluster=SETTINGS
            )
            object.__setattr__(found.context, "config", config)
        yield found
