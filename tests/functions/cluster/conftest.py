"""An API server, and a cluster that is impatient: pauses of milliseconds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pilotlight.kubernetes.cluster import CallDeadlines, Cluster
from pilotlight.kubernetes.retry_policy import RetryDelays
from pilotlight.kubernetes.settings import ClusterSettings
from tests.fakes.kubernetes.server import ApiServer

IMPATIENT = CallDeadlines(
    pauses=RetryDelays(first_s=0.002, most_s=0.02),
    watch_pauses=RetryDelays(first_s=0.002, most_s=0.05),
)


@pytest.fixture
async def api_server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as server:
        yield server


@pytest.fixture
async def cluster(api_server: ApiServer, tmp_path: Path) -> AsyncIterator[Cluster]:
    kubeconfig = api_server.write_kubeconfig(tmp_path / "kubeconfig")
    async with await Cluster.connect(
        ClusterSettings(kubeconfig=str(kubeconfig)), patience=IMPATIENT
    ) as cluster:
        yield cluster
