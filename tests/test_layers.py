"""The import contracts in pyproject.toml hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_every_import_contract_is_kept() -> None:
    program = Path(sys.executable).parent / "lint-imports"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "functions")}

    run = subprocess.run(
        [program, "--no-logo"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stdout + run.stderr
