"""Fixtures that are whole platforms."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.harness import PlatformUnderTest, platform_up


@pytest.fixture(scope="session")
def platform() -> Iterator[PlatformUnderTest]:
    """One platform for all tests that only use it."""
    with platform_up() as running:
        yield running


@pytest.fixture(scope="session")
def mortal_platform() -> Iterator[PlatformUnderTest]:
    """One platform for all tests that kill parts of it, by turns: each has to leave it whole, and
    nothing of its own running."""
    with platform_up() as running:
        yield running
