"""Fixtures of pods."""

from __future__ import annotations

import pytest

from tests.fakes.image_registry import ImageRegistry
from tests.fakes.pushed_image import push_image
from tests.fakes.warm_pod import TARGET


@pytest.fixture(scope="session")
def pushed(image_registry: ImageRegistry) -> str:
    """A function's container image, in the registry of the tests."""
    return push_image(image_registry, node_directory=TARGET)
