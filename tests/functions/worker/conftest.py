"""A client of a test's `instance`."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.fakes.fake_shim import FakeInstance
from tests.fakes.plain_http import NO_TLS


@pytest.fixture
def client(instance: FakeInstance) -> Iterator[httpx.Client]:
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=instance.path, verify=NO_TLS),
        base_url="http://worker",
        timeout=30,
    ) as client:
        yield client
