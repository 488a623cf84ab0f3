"""Three minutes of the soak run (`benchmarks.soak`): mixed load, deploys, and kills of all four
processes. What lasts longer is measured by hand (docs/benchmarks/soak.md)."""

from __future__ import annotations

import pytest

from benchmarks.soak import QUICK, Run, reported, soak
from benchmarks.soak_samples import MODULES, growth_of_process

MORE_DESCRIPTORS, MORE_KIB = 30, 24 * 1024
"""Most growth of a process in the minute after the kills: connections and caches come back. The
agent has a descriptor and memory for each Template, whose number still grows."""


@pytest.fixture(scope="module")
def run() -> Run:
    return soak(QUICK)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_nothing_is_lost_and_nothing_grows_under_mixed_load_and_kills(run: Run) -> None:
    report = reported(run)
    print("\n".join(report.remarks))
    assert {name for _, name in run.kills} == set(MODULES.values())
    assert report.ratios == {
        "records_missing": 0,
        "records_unexplained": 0,
        "ledger_differences": 0,
    }
    for kind in ("hot", "from zero", "stores"):
        statuses = {status: n for (k, status), n in run.outcomes.items() if k == kind}
        assert statuses.pop("200") > 0
        assert statuses.keys() <= {"503", "lost"}, f"{kind}: {statuses}"
        assert statuses.get("lost", 0) <= len(run.kills)
    assert {status for kind, status in run.outcomes if kind == "raises"} <= {"500", "503", "lost"}
    assert run.outcomes["deploys", "done"] > 0
    _, after = run.calm()
    for name in ("activator", "controller", "weight cache"):
        descriptors = growth_of_process(after, name, "descriptors")
        memory = growth_of_process(after, name, "anonymous_kib")
        assert descriptors.end - descriptors.begin <= MORE_DESCRIPTORS, (name, descriptors)
        assert memory.end - memory.begin <= MORE_KIB, (name, memory)
