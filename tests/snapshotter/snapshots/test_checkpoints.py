"""A proof that is given up: what becomes of the snapshot."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn, cast

import pytest

from snapshotter.checkpointing.checkpoints import Checkpoints
from snapshotter.checkpointing.trial_restore import SnapshotValidator, nobody_pays
from snapshotter.events import Events
from snapshotter.metrics import Metrics
from snapshotter.snapshots.catalog import Catalog
from snapshotter.snapshots.components import SnapshotComponents
from snapshotter.snapshots.predictions import Predictions
from snapshotter.snapshots.restores import LAUNCH
from snapshotter.snapshots.selector import SnapshotSelector
from snapshotter.types import LaunchSpec, RevisionKey
from tests.snapshotter.snapshots import shapes

SPEC = LaunchSpec(
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


class Endless:
    """Proofs that do not end (`proofs.Proofs`)."""

    async def prove(self, *_: object, **__: object) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("was_proven", [True, False])
async def test_a_proof_that_is_given_up_costs_only_what_was_never_proven(
    catalogue: Catalog, was_proven: bool
) -> None:
    make = shapes.ready if was_proven else shapes.publish
    snapshot = await make(
        catalogue,
        point={
            "pid": 1,
            "threads": [],
            "phases_ms": {},
            LAUNCH: json.loads(json.dumps(SPEC.to_json())),
        },
    )
    nothing, metrics = cast(Any, None), Metrics()
    stock = SnapshotComponents(
        catalogue=catalogue,
        criu=nothing,
        kit=nothing,
        kdat=None,
        images=nothing,
        node=nothing,
        remote=None,
    )
    selector = SnapshotSelector(
        stock, None, events=Events(), metrics=metrics, predictions=Predictions()
    )
    checkpoints = Checkpoints(
        stock=stock,
        selector=selector,
        dumps=nothing,
        proofs=cast(SnapshotValidator, Endless()),
        metrics=metrics,
    )

    proof = asyncio.create_task(checkpoints.prove(snapshot.id, nobody_pays))
    await asyncio.sleep(0)
    proof.cancel()
    await asyncio.wait([proof])

    assert [s.id for s in catalogue] == ([snapshot.id] if was_proven else [])
