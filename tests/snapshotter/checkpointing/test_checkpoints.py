"""Creation of snapshots without processes: what is tried again, and a proof that is given up."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn, cast

import pytest

from snapshotter.checkpointing.checkpoints import Checkpoints
from snapshotter.checkpointing.dumps import DumpBlocked, Dumps
from snapshotter.checkpointing.trial_restore import (
    ProofFailed,
    RestoreTiming,
    SnapshotValidator,
    ValidationResult,
    uncharged,
)
from snapshotter.errors import SnapshotRefused
from snapshotter.events import Events
from snapshotter.gpus.grants import GpuGrants
from snapshotter.gpus.inventory import GpuInventory
from snapshotter.metrics import Metrics
from snapshotter.slots.occupied_slot import StartPhase
from snapshotter.snapshots.catalog import Catalog
from snapshotter.snapshots.components import SnapshotComponents
from snapshotter.snapshots.manifest import SnapshotManifest
from snapshotter.snapshots.predictions import Predictions
from snapshotter.snapshots.restores import LAUNCH
from snapshotter.snapshots.selector import SnapshotSelector
from snapshotter.snapshots.stored import Snapshot, SnapshotStaging
from snapshotter.types import GpuGrant, LaunchSpec, RevisionKey, SnapshotState
from tests.fakes import fake_nvml
from tests.fakes.fake_nvml import inventory_of
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


class NoneFound(SnapshotSelector):
    """No snapshot exists before the one that is made."""

    async def find(
        self, launch: LaunchSpec, phase: StartPhase, *, waits: bool = False
    ) -> Snapshot | None:
        return None


class Dumping:
    """Dumps (`dumps.Dumps`) that fail with each of `failures` in turn, and then work."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.calls = 0
        self.gpus: list[GpuGrant | None] = []

    async def dump(
        self,
        launch: LaunchSpec,
        stage: SnapshotStaging,
        *,
        unasked: bool,
        gpus: GpuGrant | None = None,
    ) -> SnapshotManifest:
        self.calls += 1
        self.gpus.append(gpus)
        if self.failures:
            raise self.failures.pop(0)
        (stage.images / "core-1.img").write_bytes(b"core")
        stage.files_tar.write_bytes(b"tar")
        return shapes.draft()


class Proving:
    """Proofs (`SnapshotValidator`) that fail with each of `failures` in turn, and then succeed."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.gpus: list[GpuGrant | None] = []

    async def prove(
        self, *_: object, gpus: GpuGrant | None = None, **__: object
    ) -> ValidationResult:
        self.gpus.append(gpus)
        if self.failures:
            raise self.failures.pop(0)
        timing = RestoreTiming(restore_ms=1.0, answer_ms=2.0)
        return ValidationResult(pages="eager", measured={"eager": timing})


class Seconds:
    """A monotonic clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def checkpoints_of(
    catalogue: Catalog,
    *,
    dumps: Dumping | None = None,
    proofs: object,
    monotonic: Callable[[], float] = time.monotonic,
    gpus: GpuGrants | None = None,
) -> Checkpoints:
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
    selector = NoneFound(stock, None, events=Events(), metrics=metrics, predictions=Predictions())
    return Checkpoints(
        stock=stock,
        selector=selector,
        dumps=cast(Dumps, dumps),
        proofs=cast(SnapshotValidator, proofs),
        metrics=metrics,
        gpus=gpus or GpuGrants(GpuInventory(), lambda: ()),
        monotonic=monotonic,
        retry_first_s=0.0,
    )


def blocked(kind: str, *, passing: bool) -> DumpBlocked:
    message = f"because of {kind}"
    reason = {"kind": kind, "fd": 7, "what": "", "where": None, "message": message}
    return DumpBlocked(message, [reason], passing=passing)


async def test_a_temporary_failure_of_a_dump_is_tried_again_within_the_request(
    catalogue: Catalog,
) -> None:
    dumps = Dumping(*(blocked("unix_peer", passing=True) for _ in range(2)))
    made = await checkpoints_of(catalogue, dumps=dumps, proofs=Proving()).make(SPEC)
    assert (made.state, dumps.calls) == (SnapshotState.READY, 3)


async def test_a_snapshot_on_a_gpu_waits_for_a_free_one_and_keeps_it_until_it_is_proven(
    catalogue: Catalog,
) -> None:
    held: list[GpuGrant] = []
    gpus = GpuGrants(inventory_of(*fake_nvml.gpus(fake_nvml.L4)), lambda: held)
    launch, dumps, proofs = replace(SPEC, gpu=("L4",)), Dumping(), Proving()
    made = checkpoints_of(catalogue, dumps=dumps, proofs=proofs, gpus=gpus)
    held.append(cast(GpuGrant, gpus.allocate(launch)))
    with pytest.raises(SnapshotRefused, match="0 of 1 L4 free") as e:
        await made.make(launch)
    assert (e.value.detail["passing"], e.value.detail["reasons"][0]["kind"]) == (True, "no_gpu")
    assert made.refused(launch.revision) is None, "it is tried again"

    (grant,) = held
    held.clear()
    await made.make(launch)
    assert dumps.gpus == proofs.gpus == [grant]
    assert gpus.granted() == frozenset()


async def test_temporary_failures_end_a_request_after_three_attempts_and_not_the_next_one(
    catalogue: Catalog,
) -> None:
    dumps = Dumping(*(blocked("unix_peer", passing=True) for _ in range(3)))
    checkpoints = checkpoints_of(catalogue, dumps=dumps, proofs=Proving())
    with pytest.raises(SnapshotRefused, match="because of unix_peer"):
        await checkpoints.make(SPEC)
    assert (dumps.calls, checkpoints.refused(SPEC.revision)) == (3, None)
    assert (await checkpoints.make(SPEC)).state is SnapshotState.READY


async def test_a_refusal_that_will_recur_is_tried_again_on_request_only_and_not_without_a_pause(
    catalogue: Catalog,
) -> None:
    dumps, clock = Dumping(*(blocked("connection", passing=False) for _ in range(3))), Seconds()
    checkpoints = checkpoints_of(catalogue, dumps=dumps, proofs=Proving(), monotonic=clock)

    async def refused(*, unasked: bool = False) -> str:
        with pytest.raises(SnapshotRefused) as e:
            await checkpoints.make(SPEC, unasked=unasked)
        return str(e.value.detail["reasons"][0]["message"])

    assert (await refused(), dumps.calls) == ("because of connection", 1)
    assert (await refused(unasked=True), dumps.calls) == ("because of connection", 1)
    assert (await refused(), dumps.calls) == ("because of connection", 2)
    told = "because of connection (refused 2 times in a row, tried again after 5 s)"
    assert (await refused(), dumps.calls) == (told, 2)
    clock.now += 5.0
    assert (await refused(), dumps.calls) == ("because of connection", 3)
    clock.now += 10.0
    assert (await checkpoints.make(SPEC)).state is SnapshotState.READY
    assert checkpoints.refused(SPEC.revision) is None


async def test_a_proof_that_was_not_answered_in_time_leaves_nothing_and_is_tried_again(
    catalogue: Catalog,
) -> None:
    late = ProofFailed("it did not answer within 20 s", passing=True)
    checkpoints = checkpoints_of(catalogue, dumps=Dumping(), proofs=Proving(late, late))
    for attempt in range(2):
        with pytest.raises(SnapshotRefused, match="20 s"):
            await checkpoints.make(SPEC)
        assert catalogue.infos({}) == []
        # a second time it is no accident: the background leaves it alone
        assert (checkpoints.refused(SPEC.revision) is not None) == (attempt == 1)
    assert (await checkpoints.make(SPEC)).state is SnapshotState.READY
    assert checkpoints.refused(SPEC.revision) is None


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
    checkpoints = checkpoints_of(catalogue, proofs=Endless())

    proof = asyncio.create_task(checkpoints.prove(snapshot.id, uncharged))
    await asyncio.sleep(0)
    proof.cancel()
    await asyncio.wait([proof])

    assert [s.id for s in catalogue] == ([snapshot.id] if was_proven else [])
