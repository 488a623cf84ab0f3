"""Killed before each of its steps, the store opens again, counts right, serves nothing wrong, and
does what it was asked to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "story, fewest_steps, is_another",
    [("small", 150, False), ("large", 25, False), ("large", 25, True)],
)
def test_killed_before_every_step(
    folder: Path, story: str, fewest_steps: int, is_another: bool
) -> None:
    """Also as a user who may not write to read-only files and directories, as root may."""
    uid = os.getuid()
    if is_another:
        if uid:
            pytest.skip("becoming another user needs root")
        uid = 65534
        os.chown(folder, uid, uid)
    command = [sys.executable, "-m", "tests.weight_cache.crashing", story, str(folder), str(uid)]
    told = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert int(told.stdout) >= fewest_steps
