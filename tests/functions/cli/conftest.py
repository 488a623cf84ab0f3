"""A control plane for commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.served_controller import ServedController


@pytest.fixture(name="served")
def _served(tmp_path: Path) -> Iterator[ServedController]:
    """The real control plane, in this process."""
    with ServedController(tmp_path) as platform:
        yield platform
