"""The process steps back for those who serve."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

GROUPED = Path("/proc/self/autogroup").exists()
ASK = """
import resource, sys
from weight_cache import process_tuning
lowered = process_tuning.lower_process_priority()
try:
    group = open("/proc/self/autogroup").read().split()[-1]
except (OSError, IndexError):  # a session of the root group has an empty file
    group = "none"
process_tuning.tune_process()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    bytes(bytearray(16 << 20))
print(lowered, group, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def ask(*, leads_its_session: bool) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        capture_output=True,
        text=True,
        check=True,
        start_new_session=leads_its_session,
        cwd=os.getcwd(),
    )
    return done.stdout.split()


@pytest.mark.skipif(not GROUPED, reason="this kernel does not group by session")
def test_the_group_of_its_own_session_is_lowered() -> None:
    assert ask(leads_its_session=True)[:2] == ["True", "10"]


def test_a_group_that_others_share_is_left_alone() -> None:
    assert ask(leads_its_session=False)[0] == "False"


def test_buffers_of_chunks_are_kept() -> None:
    faults = int(ask(leads_its_session=True)[-1])
    assert faults < 3 * 4096  # 16 buffers of 4,096 pages each; two at a time are in use
