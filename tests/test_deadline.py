"""A test that cannot be interrupted ends its process and is named, and the others run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUSY = """
import asyncio
import pytest

@pytest.mark.timeout(1)
def test_whose_loop_is_always_busy():
    async def busy():
        loop = asyncio.get_running_loop()
        def again():
            loop.call_soon(again)
            sum(range(20_000))
        again()
        await asyncio.sleep(3600)
    asyncio.run(busy())

def test_after_it():
    pass
"""
CONFTEST = """
from tests import deadline
deadline.GRACE_S = 1.0
pytest_plugins = ["tests.deadline"]
"""


@pytest.mark.timeout(60)
@pytest.mark.slow
def test_a_loop_that_is_always_busy_ends_and_the_next_test_runs(tmp_path: Path) -> None:
    (tmp_path / "test_busy.py").write_text(BUSY)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", "-q"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    ran = subprocess.run(
        [*command, "-o", "timeout=5", "."],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 failed, 1 passed" in ran.stdout, ran.stdout + ran.stderr
    assert "test_whose_loop_is_always_busy" in ran.stdout
