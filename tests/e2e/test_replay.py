"""A replay on a whole platform whose activator is killed while it runs, and one that is
interrupted: what was compared is reported."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import PlatformUnderTest, wait_for

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(180),
    pytest.mark.slow,  # an activator is started again
]
LINES = 120


def started(platform: PlatformUnderTest, directory: Path, *words: str) -> subprocess.Popen[str]:
    """A replay of LINES calls of work/again, which writes its rows to rows.jsonl."""
    platform.deploy("work.py")
    rows = directory / "calls.jsonl"
    rows.write_text(
        "".join(f"{json.dumps({'input': {'n': n}, 'output': [n, '']})}\n" for n in range(LINES))
    )
    command = [sys.executable, "-m", "pilotlight", "replay", "work/again", "--on", "stable"]
    options = ["--from", str(rows), "--out", str(directory / "rows.jsonl"), "--ignore", "$[1]"]
    return subprocess.Popen(
        [*command, *options, "--json", *words],
        env={**platform.environ(), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any]]:
    out, error = process.communicate(timeout=120)
    assert out, error
    return process.returncode, json.loads(out)


def test_an_activator_is_killed_under_a_replay(
    mortal_platform: PlatformUnderTest, tmp_path: Path
) -> None:
    process = started(mortal_platform, tmp_path)
    wait_for(lambda: rows_in(tmp_path) >= 20, "20 answers")
    mortal_platform.wait_restarted("activator", mortal_platform.kill("activator"))
    status, found = ended(process)
    assert (status, found["stopped"]) == (0, ""), found
    assert found["compared"] + found["failed"] == LINES
    assert found["equal"] == found["compared"] >= LINES - 8
    assert set(found["failures"]) <= {"unavailable"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_replay_reports_what_was_compared(
    mortal_platform: PlatformUnderTest, tmp_path: Path, number: signal.Signals
) -> None:
    process = started(mortal_platform, tmp_path, "--concurrency", "1")
    wait_for(lambda: rows_in(tmp_path) >= 5, "5 answers")
    process.send_signal(number)
    status, found = ended(process)
    assert (status, found["stopped"]) == (130, "interrupted")
    assert 5 <= found["equal"] < LINES


def rows_in(directory: Path) -> int:
    """Rows that were replayed so far."""
    path = directory / "rows.jsonl"
    return path.read_text().count("\n") if path.exists() else 0
