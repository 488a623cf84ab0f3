"""An activator in front of a worker that streams what the test puts into it."""

from __future__ import annotations

import pytest

from activator.settings import ActivatorSettings
from tests.activator.conftest import PATIENCE_S, Edge
from tests.activator.streams.world import GENERATOR, Released
from tests.fakes.fake_worker import Behaviour
from tests.fakes.routes import route_of, spec_of


@pytest.fixture(name="every_s")
def _every_s() -> float:
    return PATIENCE_S


@pytest.fixture(name="settings")
def _settings(every_s: float) -> ActivatorSettings:
    return ActivatorSettings(max_body_bytes=100_000, heartbeat_s=every_s)


@pytest.fixture(name="worker")
def _worker() -> Released:
    return Released()


@pytest.fixture(name="behaviour")
def _behaviour(worker: Released) -> Behaviour:
    return worker


@pytest.fixture(name="generator")
def _generator(edge: Edge) -> Edge:
    edge.add(route_of(spec_of(methods=GENERATOR)))
    return edge
