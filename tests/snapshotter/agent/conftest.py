"""A client of an agent with and without namespaces."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest

from snapshotter.client import AgentClient
from tests.fakes.agent_home import AgentHome


@pytest.fixture(params=["namespaces", "plain"])
async def client(request: pytest.FixtureRequest, home: AgentHome) -> AsyncIterator[AgentClient]:
    if request.param == "namespaces" and os.geteuid() != 0:
        pytest.skip("needs root")
    async with home.agent(namespaces=request.param == "namespaces"), home.client() as client:
        yield client
