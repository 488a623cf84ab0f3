"""What the soak run makes of its samples."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from benchmarks.soak_picture import PANELS, drawn
from benchmarks.soak_samples import (
    MODULES,
    Growth,
    ProcessSample,
    Sample,
    growth_of_process,
)

MACHINE = {"cpu": "Example <CPU>", "cores": 2, "time": "2026-11-30T00:00:00Z"}


def sample(at_s: float, *, pid: int = 7, kib: int = 1000, ledger_ms: float | None = 5.0) -> Sample:
    process = ProcessSample(pid=pid, anonymous_kib=kib, descriptors=10)
    return Sample(
        at_s=at_s,
        calls=int(at_s),
        processes=dict.fromkeys(MODULES.values(), process) if pid else {},
        disk_bytes={"controller": 2**20},
        ledger_ms=ledger_ms,
    )


def test_growth_is_from_the_first_fifth_to_the_last() -> None:
    growth = Growth.of([(float(s), 100.0 + s) for s in range(0, 100, 10)])
    assert (growth.begin, growth.end) == (105, 185)
    assert growth.per_hour == pytest.approx(3600)


def test_growth_of_one_moment_is_not_that_of_the_rest() -> None:
    points = [(float(s), 100.0) for s in range(100)]
    points[50] = (50.0, 10_000.0)
    assert Growth.of(points).per_hour == 0


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="9 samples: growth needs 10 at least"):
        Growth.of([(float(s), 1.0) for s in range(9)])


def test_growth_of_a_process_is_of_its_longest_life() -> None:
    short = [sample(s, pid=1, kib=50_000 * s) for s in range(1, 12)]
    long = [sample(20 + s, pid=2, kib=2000) for s in range(20)]
    assert growth_of_process([*short, *long], "agent", "anonymous_kib").begin == 2000


def test_the_picture_has_a_panel_for_each_quantity_and_a_gap_where_a_process_was_away() -> None:
    samples = [sample(0.0), sample(30.0), sample(60.0, pid=0, ledger_ms=None), sample(90.0)]
    picture = ET.fromstring(drawn(samples, [(55.0, "agent")], machine=MACHINE))
    texts = "".join(picture.itertext())
    assert all(title in texts for title, _ in PANELS)
    assert "Example <CPU>" in texts
    lines = [path.get("d", "") for path in picture.iter() if "line a" in path.get("class", "")]
    assert sum(line.count("M") == 2 for line in lines) >= 3


def test_a_report_that_waited_for_a_killed_controller_is_cut() -> None:
    samples = [sample(float(s), ledger_ms=9000.0 if s == 30 else 7.0) for s in range(100)]
    texts = list(ET.fromstring(drawn(samples, [], machine=MACHINE)).itertext())
    assert "Usage report, ms (1 higher values are cut)" in texts


def test_a_run_without_samples_draws_nothing() -> None:
    with pytest.raises(ValueError, match="no samples"):
        drawn([], [], machine=MACHINE)
