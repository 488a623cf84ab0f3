"""A warm call of a function that uses no special feature does not become more expensive unnoticed:
its bytecode instructions are the same in every run and on every machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.warm_call_instructions import PLAIN, QUOTAS, instructions

RECORDED = {PLAIN: 2_509, QUOTAS: 2_865}
"""Instructions of Python 3.11; a change that lowers them records the new number."""
GROWTH = 1.01
"""A feature that a call does not use may cost it one per cent."""


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other Pythons have other instructions")
@pytest.mark.parametrize("kind", RECORDED)
def test_warm_call_runs_as_many_instructions_as_recorded(short_tmp: Path, kind: str) -> None:
    counts = instructions(short_tmp, kind)

    assert counts.total() <= RECORDED[kind] * GROWTH, (
        f"{counts.total()} instructions instead of {RECORDED[kind]}: take them off the path of calls "
        f"that do not need them (`python -m benchmarks.warm_call_instructions` lists them by function)"
    )
