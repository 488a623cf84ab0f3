"""Dicts and queues on a real platform whose controller is killed."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

import pilotlight
from pilotlight.client import sessions
from pilotlight.errors import Unavailable
from tests.e2e.harness import PlatformUnderTest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
NUMBERS = 150
APP = """
import pilotlight

app = pilotlight.App("echoes")


@app.function()
def echo(number: int) -> int:
    numbers = pilotlight.Queue.from_name("numbers")
    found = [numbers.get(timeout=60) for _ in range(number)]
    numbers.put(sum(found), partition="sums")
    return len(found)
"""


def test_a_killed_controller_loses_no_value_that_it_acknowledged(
    mortal_platform: PlatformUnderTest, tmp_path: Path
) -> None:
    """A function takes what a client puts, while the controller is killed."""
    platform = mortal_platform
    (tmp_path / "echoes.py").write_text(APP)
    platform.cli("deploy", str(tmp_path / "echoes.py"), "--no-wait")
    with sessions.use_profile(platform.profile):
        numbers = pilotlight.Queue.from_name("numbers", create_if_missing=True)
        kept = pilotlight.Dict.from_name("kept", create_if_missing=True)
        assert numbers.len() == 0
        taking = pilotlight.Function.from_name("echoes", "echo").spawn(10)
        for _ in range(10):
            numbers.put(1)
        assert taking.get(timeout=120) == 10
        assert numbers.get(partition="sums") == 10
        acknowledged: set[int] = set()

        def put() -> None:
            for number in range(NUMBERS):
                try:
                    kept[number] = number
                    numbers.put(number)
                except Unavailable:
                    time.sleep(0.05)
                else:
                    acknowledged.add(number)

        putting = threading.Thread(target=put)
        putting.start()
        while len(acknowledged) < NUMBERS // 10:
            time.sleep(0.005)
        killed = platform.kill("controller")
        platform.wait_restarted("controller", killed)
        putting.join()
        found = numbers.get_many(2 * NUMBERS)
        assert acknowledged <= set(found)
        assert acknowledged <= set(kept.keys())
        assert len(found) == len(set(found))  # a put that was sent again is stored once
        pilotlight.Dict.delete("kept")
        pilotlight.Queue.delete("numbers")
    sessions.close()
    platform.cli("app", "delete", "echoes", "--yes")
