"""A platform that all examples are deployed to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.harness import PlatformUnderTest, platform_up
from tests.fakes.host_address import host_address


def _own_addresses() -> list[str]:
    try:
        return [host_address()]
    except pytest.skip.Exception:  # it skips the test that needs one
        return []


@pytest.fixture(scope="package")
def platform() -> Iterator[PlatformUnderTest]:
    """One platform for all examples."""
    with platform_up(
        activator={"prediction_log_ship_s": 1},
        snapshotter={"egress_allowed": _own_addresses()},  # a Redis of the test
    ) as running:
        yield running
