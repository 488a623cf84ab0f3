"""`import pilotlight` is what every user's script pays for, so it stays light."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIMIT_S = 0.150
"""A tenth of a second is where a command stops feeling immediate; half of that again for a slow
machine. Of the process's own time: what else runs on the machine is no part of it."""
HEAVY = (
    "torch",
    "numpy",
    "fastapi",
    "pydantic",
    "httpx",
    "rich",
    "typer",
    "boto3",
    "sqlalchemy",
    "uvicorn",
    "transformers",
)

PROBE = f"""
import json, sys, time
started = time.process_time()
import pilotlight
seconds = time.process_time() - started
print(json.dumps([seconds, [name for name in {HEAVY!r} if name in sys.modules]]))
"""


def _import_in_a_fresh_interpreter() -> tuple[float, list[str]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "functions")}
    run = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=True
    )
    seconds, heavy = json.loads(run.stdout)
    return seconds, heavy


def test_importing_the_sdk_brings_in_nothing_heavy() -> None:
    _, heavy = _import_in_a_fresh_interpreter()

    assert heavy == []


@pytest.mark.slow
def test_importing_the_sdk_takes_less_than_150_ms() -> None:
    best = min(_import_in_a_fresh_interpreter()[0] for _ in range(5))

    assert best < LIMIT_S
