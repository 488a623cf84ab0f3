"""What `benchmarks/fleet.py` counts, in the small: numbers that must hold on any machine."""

from __future__ import annotations

from pathlib import Path

from benchmarks import fleet_scaling


async def test_a_scale_from_zero_is_at_most_two_calls_of_the_api(tmp_path: Path) -> None:
    took_ms, calls = await fleet_scaling.poked(tmp_path, revisions=2, pokes=2)
    assert len(took_ms) == 2
    assert calls == [1.0, 1.0]
    assert await fleet_scaling.woken(tmp_path, starts=1) == [0.0]
