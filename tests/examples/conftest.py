"""A platform that all examples are deployed to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.harness import PlatformUnderTest, platform_up


@pytest.fixture(scope="package")
def platform() -> Iterator[PlatformUnderTest]:
    """One platform for all examples."""
    with platform_up(activator={"prediction_log_ship_s": 1}) as running:
        yield running
