"""Decisions around snapshots, without processes: how long RESTORE may take, and when a snapshot is
made unasked."""

from __future__ import annotations

import asyncio

import pytest

from pilotlight.core.background_tasks import BackgroundTasks
from snapshotter.errors import SnapshotRefused
from snapshotter.snapshots.background_builder import BackgroundBuilder
from snapshotter.starts.strategy import restore_deadline_s
from snapshotter.types import LaunchSpec, RevisionKey
from tests.fakes.agent_home import AgentHome
from tests.fakes.clock import ManualClock


class FakeMaker:
    """Makes nothing; remembers what it was asked for. `refuses` names revisions that cannot be
    snapshotted."""

    def __init__(self) -> None:
        self.made: list[RevisionKey] = []
        self.refuses: set[RevisionKey] = set()
        self.fails = ""
        self.closed = False

    def refused(self, revision: RevisionKey) -> SnapshotRefused | None:
        return SnapshotRefused("it holds a socket") if revision in self.refuses else None

    async def make(self, launch: LaunchSpec, *, unasked: bool = False) -> None:
        assert unasked
        self.made.append(launch.revision)
        if self.fails:
            raise SnapshotRefused("not now", {"reasons": [{"kind": self.fails}], "passing": True})

    async def aclose(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    "restore_ms, cold_ms, left_s, deadline_s",
    [
        (50, 5_000, 60, 2.0),  # the floor
        (2_000, 30_000, 300, 8.0),  # four times what is expected
        (2_000, 30_000, 50, 5.0),  # what COLD leaves of it
        # half of it is COLD's, whose next boot may take much longer than the last one
        (1_000, 1_200, 6, 3.0),
        (4_500, 30_000, 49, None),  # COLD leaves less than RESTORE needs
        (50, 40, 60, None),  # COLD is faster
        (50, 30_000, 20, 20),  # COLD does not fit any more: RESTORE is the only hope
    ],
)
def test_restore_never_takes_the_time_that_cold_needs(
    restore_ms: float, cold_ms: float, left_s: float, deadline_s: float | None
) -> None:
    assert restore_deadline_s(restore_ms=restore_ms, cold_ms=cold_ms, left_s=left_s) == deadline_s


async def test_snapshots_that_nobody_asked_for_are_bounded_by_the_hour(home: AgentHome) -> None:
    maker, background_tasks, now = FakeMaker(), BackgroundTasks(), ManualClock(0.0)
    builder = BackgroundBuilder(
        maker, background_tasks=background_tasks, per_hour=2, delay_s=0.0, clock=now
    )

    assert [builder.want(home.launch(f"f@{i}")) for i in range(3)] == [True, True, False]
    now.now = 1799.0
    assert not builder.want(home.launch("f@3"))
    now.now = 1801.0
    assert builder.want(home.launch("f@4"))
    await background_tasks.aclose()
    assert sorted(maker.made) == ["f@0", "f@1", "f@4"]


async def test_what_cannot_be_snapshotted_is_not_tried_again_and_costs_nothing(
    home: AgentHome,
) -> None:
    maker, background_tasks = FakeMaker(), BackgroundTasks()
    maker.refuses.add(RevisionKey("f@1"))
    builder = BackgroundBuilder(maker, background_tasks=background_tasks, per_hour=1, delay_s=0.0)

    assert not builder.want(home.launch("f@1"))
    assert not builder.want(home.launch("f@2", snapshot=False))
    assert builder.want(home.launch("f@3"))
    assert not builder.want(home.launch("f@3"))
    await background_tasks.aclose()
    assert maker.made == ["f@3"]


async def test_a_temporary_failure_is_retried_with_pauses_and_then_at_a_later_start(
    home: AgentHome,
) -> None:
    maker, background_tasks, now = FakeMaker(), BackgroundTasks(), ManualClock(0.0)
    builder = BackgroundBuilder(
        maker,
        background_tasks=background_tasks,
        per_hour=10,
        delay_s=0.0,
        retry_s=(0.001, 0.001),
        clock=now,
    )
    maker.fails = "disk"

    assert builder.want(home.launch())
    await background_tasks.aclose()
    assert len(maker.made) == 3
    assert not builder.want(home.launch())
    now.now, maker.fails = 601.0, ""
    assert builder.want(home.launch())
    await background_tasks.aclose()
    assert len(maker.made) == 4


async def test_retries_are_bounded_by_the_hour(home: AgentHome) -> None:
    maker, background_tasks = FakeMaker(), BackgroundTasks()
    builder = BackgroundBuilder(
        maker,
        background_tasks=background_tasks,
        per_hour=2,
        delay_s=0.0,
        retry_s=(0.0,) * 5,
        clock=ManualClock(0.0),
    )
    maker.fails = "disk"

    assert builder.want(home.launch())
    await background_tasks.aclose()
    assert len(maker.made) == 2


async def test_a_deleted_function_is_not_retried(home: AgentHome) -> None:
    maker, background_tasks = FakeMaker(), BackgroundTasks()
    builder = BackgroundBuilder(
        maker, background_tasks=background_tasks, per_hour=10, delay_s=0.0, retry_s=(0.05,)
    )
    maker.fails = "disk"

    assert builder.want(home.launch("fn-1@r1"))
    await asyncio.sleep(0.01)
    builder.forget(revision=None, function="fn-1")
    await background_tasks.aclose()
    assert maker.made == ["fn-1@r1"]


async def test_what_came_too_late_for_its_template_is_wanted_by_the_next_cold_start(
    home: AgentHome,
) -> None:
    maker, background_tasks = FakeMaker(), BackgroundTasks()
    builder = BackgroundBuilder(
        maker, background_tasks=background_tasks, per_hour=10, delay_s=0.0, clock=ManualClock(0.0)
    )
    maker.fails = "template_gone"

    for _ in range(2):
        assert builder.want(home.launch())
        await background_tasks.aclose()
    assert len(maker.made) == 2


async def test_a_builder_that_closes_begins_nothing_more(home: AgentHome) -> None:
    maker, background_tasks = FakeMaker(), BackgroundTasks()
    builder = BackgroundBuilder(
        maker, background_tasks=background_tasks, per_hour=10, delay_s=3600.0
    )

    assert builder.want(home.launch("f@1"))
    await asyncio.sleep(0)
    await builder.aclose()
    await background_tasks.aclose()
    assert (maker.made, maker.closed, builder.want(home.launch("f@2"))) == ([], True, False)


async def test_without_snapshots_nothing_is_wanted(home: AgentHome) -> None:
    builder = BackgroundBuilder(None, background_tasks=BackgroundTasks(), per_hour=10)

    assert not builder.want(home.launch())
    await builder.aclose()
