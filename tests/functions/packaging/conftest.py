"""A controller's API, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pilotlight.client.client import Client
from tests.fakes.fake_platform import FakePlatform


@pytest.fixture
def platform() -> Iterator[FakePlatform]:
    with FakePlatform() as platform:
        yield platform


@pytest.fixture
def client(platform: FakePlatform) -> Iterator[Client]:
    with Client(platform.profile()) as client:
        yield client
