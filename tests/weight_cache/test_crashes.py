"""Killed before each of its steps, the store opens again, counts right, serves nothing wrong, and does what it was asked to."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="pl"))
    yield made
    shutil.rmtree(made)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("story, fewest_steps", [("small", 150), ("large", 25)])
def test_killed_before_every_step(folder: Path, story: str, fewest_steps: int) -> None:
    command = [sys.executable, "-m", "tests.weight_cache.crashing", story, str(folder)]
    told = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert int(told.stdout) >= fewest_steps
