"""What starts are expected to take, of which the choice between RESTORE and COLD is made."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, NoReturn, cast

import pytest

from snapshotter.events import Events
from snapshotter.metrics import Metrics
from snapshotter.slots.occupied_slot import StartPhase
from snapshotter.snapshots.catalog import Catalog
from snapshotter.snapshots.components import SnapshotComponents
from snapshotter.snapshots.predictions import Predictions
from snapshotter.snapshots.restores import Restores
from snapshotter.snapshots.selector import SnapshotSelector
from snapshotter.snapshots.stored import Snapshot
from snapshotter.types import LaunchSpec, RevisionKey, StartKind
from tests.snapshotter.snapshots import shapes

COLD_MS = 400.0
LAUNCH = LaunchSpec(
    revision=RevisionKey("fn-1@r1"),
    trust_domain="t",
    uid=None,
    bundle="b",
    image=None,
    entry={},
    memory_bytes=1,
    cpu=1.0,
    startup_timeout_s=20.0,
)


class Starved:
    """Restores that get no processor (`restores.Restores`)."""

    async def restore(self, *_: object, **__: object) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError


@pytest.fixture
def selector(catalogue: Catalog) -> SnapshotSelector:
    predictions, nothing = Predictions(), cast(Any, None)
    predictions.observe(LAUNCH.revision, StartKind.COLD, COLD_MS)
    stock = SnapshotComponents(
        catalogue=catalogue,
        criu=nothing,
        kit=nothing,
        kdat=None,
        images=nothing,
        node=nothing,
        remote=None,
    )
    return SnapshotSelector(
        stock,
        cast(Restores, Starved()),
        events=Events(),
        metrics=Metrics(),
        predictions=predictions,
    )


async def proven(catalogue: Catalog, restore_ms: float) -> Snapshot:
    snapshot = await shapes.publish(catalogue)
    return await catalogue.mark_proven(
        snapshot.id, replace(shapes.proof(), restore_ms=restore_ms), pages="eager", phases_ms={}
    )


async def test_a_restore_takes_as_long_as_its_proof_did_until_one_was_seen(
    selector: SnapshotSelector, catalogue: Catalog
) -> None:
    snapshot = await proven(catalogue, 90.0)
    assert selector.restore_ms(LAUNCH, snapshot) == 90.0

    selector.took(LAUNCH, StartKind.RESTORE, 120.0)

    assert selector.restore_ms(LAUNCH, snapshot) == 120.0


async def test_a_snapshot_that_was_proven_in_a_busy_moment_is_tried_all_the_same(
    selector: SnapshotSelector, catalogue: Catalog
) -> None:
    snapshot = await proven(catalogue, 5000.0)
    assert selector.restore_ms(LAUNCH, snapshot) < COLD_MS

    selector.took(LAUNCH, StartKind.RESTORE, 900.0)

    assert selector.restore_ms(LAUNCH, snapshot) == 900.0  # it was not the moment: COLD is faster


async def late(
    selector: SnapshotSelector,
    snapshot: Snapshot,
    *,
    gives_way: bool = False,
    is_start: bool = False,
) -> None:
    phase = StartPhase(is_background=gives_way)
    assert (
        await selector.restore(
            LAUNCH, snapshot, phase, cast(Any, None), deadline_s=0.001, is_start=is_start
        )
        is None
    )


async def test_a_start_that_was_late_is_expected_to_be_late_again(
    selector: SnapshotSelector, catalogue: Catalog
) -> None:
    snapshot = await proven(catalogue, 90.0)
    await late(selector, snapshot)
    assert selector.restore_ms(LAUNCH, snapshot) == 90.0

    await late(selector, snapshot, is_start=True)

    assert selector.restore_ms(LAUNCH, snapshot) == 1.0


@pytest.mark.parametrize("gives_way", [False, True])
async def test_three_that_are_late_are_held_against_a_snapshot_unless_they_gave_way(
    selector: SnapshotSelector, catalogue: Catalog, gives_way: bool
) -> None:
    snapshot = await proven(catalogue, 90.0)
    for _ in range(3):
        await late(selector, snapshot, gives_way=gives_way)

    assert [q.id for q in catalogue.quarantined] == ([] if gives_way else [snapshot.id])
