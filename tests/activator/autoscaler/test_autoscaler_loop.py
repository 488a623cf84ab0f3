"""The loop around the decider: what is started, drained, adopted and forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from activator.autoscaler.autoscaler_loop import DROP_S
from activator.balancing.throttler import Throttler
from activator.routing.route_table import CallTarget
from pilotlight.errors import StartFailed
from pilotlight.protocol import FeedChange
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.traffic import TrafficDocument, to_json, with_weights
from snapshotter import errors
from snapshotter.types import StartKind
from tests.activator.scaled_world import ScaledWorld
from tests.activator.test_gateway import until
from tests.fakes.fake_fleet import info_of
from tests.fakes.routes import TENANT, change, route_of, spec_of


class Rig(ScaledWorld):
    """One function's autoscaler."""

    def deploy(
        self, scaling: Scaling | None = None, *, revision: str = "v1-abcdef", snapshots: bool = True
    ) -> CallTarget:
        self.seq += 1
        route = route_of(spec_of(scaling=scaling), revision=revision)
        launch: Any = route.revisions[revision]["launch"]
        launch["snapshot"] = snapshots
        self.table.apply(change(self.seq, route))
        return self.table.targets_of(f"{TENANT}/main/shop/hello")[0]


async def test_a_call_that_is_cancelled_in_the_moment_of_its_slot_is_no_load_any_more(
    rig: Rig,
) -> None:
    throttler = rig.scaler.throttler_of(rig.deploy(Scaling(max_inputs=1, max_instances=1)))
    first = await throttler.reserve(5.0)
    waiting = asyncio.create_task(throttler.reserve(5.0))
    await asyncio.sleep(0)

    waiting.cancel()
    first.release()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    assert throttler.load.consume_average(rig.clock(), 0.0) == 0


@pytest.fixture(name="rig")
async def _rig(short_tmp: Path) -> AsyncIterator[Rig]:
    async with Rig.running(short_tmp) as rig:
        yield rig


async def test_an_idle_instance_goes_after_its_scaledown_window_and_the_revision_is_forgotten(
    rig: Rig,
) -> None:
    target = rig.deploy(Scaling(scaledown_window_s=10))
    throttler = rig.scaler.throttler_of(target)
    (await throttler.reserve(5.0)).release()

    rig.pass_s(8)
    assert len(throttler.instances) == 1
    rig.pass_s(6)
    assert len(throttler.instances) == 0
    rig.pass_s(int(DROP_S) + 4)

    assert repr(rig.scaler) == "<AutoscalerLoop 0 active revisions>"
    await until(lambda: len(rig.fleet.stopped) == 1)


async def test_a_busy_instance_is_never_stopped(rig: Rig) -> None:
    target = rig.deploy(Scaling(scaledown_window_s=2))
    throttler = rig.scaler.throttler_of(target)
    reservation = await throttler.reserve(5.0)

    rig.pass_s(120)

    assert list(throttler.instances) == [reservation.instance.id]
    reservation.release()


async def test_min_instances_are_there_without_being_asked_and_stay(rig: Rig) -> None:
    target = rig.deploy(Scaling(min_instances=2, scaledown_window_s=1))
    throttler = rig.scaler.throttler_of(target)
    await until(lambda: len(throttler.instances) == 2)

    rig.pass_s(200)

    assert len(throttler.instances) == 2


async def test_a_revision_that_does_not_start_is_tried_less_and_less_often(rig: Rig) -> None:
    """Each of its starts costs its tenant CPU time. Calls do not wait for the next attempt."""
    rig.fleet.broken["hello"] = errors.StartFailed("no module")
    target = rig.deploy(Scaling(min_instances=1))
    throttler = rig.scaler.throttler_of(target)

    async def failures_in(seconds: int) -> int:
        before = len(rig.fleet.started)
        for _ in range(seconds):
            rig.pass_s(1)
            rig.decide()
            await until(lambda: not throttler.starting)
        return len(rig.fleet.started) - before

    assert 4 <= await failures_in(60) <= 8
    assert await failures_in(300) <= 12
    with pytest.raises(StartFailed):
        await throttler.reserve(5.0)

    del rig.fleet.broken["hello"]
    (await throttler.reserve(5.0)).release()
    assert not throttler.is_start_paused


async def test_buffer_instances_are_spare_while_there_is_work_only(rig: Rig) -> None:
    target = rig.deploy(Scaling(buffer_instances=1, scaledown_window_s=4))
    throttler = rig.scaler.throttler_of(target)
    reservation = await throttler.reserve(5.0)
    rig.pass_s(4)
    await until(lambda: len(throttler.instances) == 2)

    reservation.release()
    rig.pass_s(60)

    assert len(throttler.instances) == 0


async def test_an_old_revision_is_drained_when_its_traffic_goes_and_its_calls_end_first(
    rig: Rig,
) -> None:
    old = rig.scaler.throttler_of(rig.deploy())
    reservation = await old.reserve(5.0)
    rig.deploy(revision="v2-fedcba")

    assert old.is_retired
    assert reservation.instance.is_draining
    assert rig.fleet.stopped == []
    reservation.release()
    await until(lambda: len(rig.fleet.stopped) == 1)


async def test_a_removed_function_gives_its_instances_back(rig: Rig) -> None:
    throttler = rig.scaler.throttler_of(rig.deploy())
    (await throttler.reserve(5.0)).release()
    rig.table.apply(FeedChange(seq=9, kind="function", key=f"{TENANT}/main/shop/hello", value=None))

    await until(lambda: len(rig.fleet.stopped) == 1)
    assert throttler.instances == {}


async def test_instances_from_before_a_restart_are_adopted_and_orphans_are_stopped(
    rig: Rig,
) -> None:
    target = rig.deploy()
    rig.fleet.infos["i-mine"] = info_of(target, "i-mine", "/nowhere", StartKind.FORK)
    gone = rig.fleet.infos["i-old"] = info_of(target, "i-old", "/nowhere", StartKind.FORK)
    object.__setattr__(gone, "revision", "f-shop-hello@v0-000000")

    await rig.reconciler.reconcile()

    assert list(rig.scaler.throttler_of(target).instances) == ["i-mine"]
    assert [name for name, _ in rig.fleet.stopped] == ["i-old"]


@pytest.mark.parametrize("count, in_panic", [(1, False), (3, True)])
async def test_a_restarted_activator_keeps_the_scale_that_it_finds(
    rig: Rig, count: int, in_panic: bool
) -> None:
    target = rig.deploy(Scaling(max_instances=4))
    for number in range(count):
        info = info_of(target, f"i-{number}", "/nowhere", StartKind.FORK)
        rig.fleet.infos[str(info.id)] = info
    await rig.reconciler.reconcile()
    rig.pass_s(2)

    decision = rig.scaler.revisions[target.key].decision
    assert decision is not None
    assert (decision.desired, decision.in_panic) == (count, in_panic)


async def test_kept_instances_from_before_a_restart_are_taken_back_before_others_are_started(
    rig: Rig,
) -> None:
    rig.scaler.reconciled.clear()
    target = rig.deploy(Scaling(min_instances=1))
    rig.fleet.infos["i-old"] = info_of(target, "i-old", "/nowhere.sock", StartKind.FORK)
    loop = asyncio.create_task(rig.scaler.run())
    await rig.reconciler.reconcile()
    await asyncio.sleep(0)
    loop.cancel()

    assert list(rig.scaler.throttler_of(target).instances) == ["i-old"]
    assert rig.scaler.throttler_of(target).starting == 0


async def test_warming_up_brings_one_instance_up_by_fork_and_bills_nobody(rig: Rig) -> None:
    target = rig.deploy()
    report = await rig.warm_up.run(target)

    assert (report["start_kind"], report["revision"]) == ("FORK", "v1-abcdef")
    assert report["template"]["phases_ms"] == {"boot": 1.0}
    await rig.books.shipper.flush()
    assert [record.kind for record in rig.ledger.records.values()] == ["START"]


async def test_a_warm_up_reports_the_proven_snapshot_and_tells_its_stages(rig: Rig) -> None:
    stages: list[str] = []
    report = await rig.warm_up.run(rig.deploy(), stages.append)

    assert stages == ["template", "snapshot", "instance"]
    assert (report["snapshot"]["state"], report["snapshot"]["restore_ms"]) == ("READY", 120.0)


REASONS = [
    {
        "kind": "connection",
        "fd": 7,
        "what": "TCP to 10.0.0.2:443",
        "where": "app.py:12",
        "message": "close it",
    }
]


@pytest.mark.parametrize(
    "error, told",
    [
        (errors.SnapshotRefused("no", {"reasons": REASONS}), {"refused": REASONS}),
        (
            errors.SnapshotRefused("busy"),
            {"refused": [{"kind": "other", "what": "", "where": None, "message": "busy"}]},
        ),
        (errors.Unsupported("no CRIU here"), {"off": "no CRIU here"}),
        (errors.NoCapacity("disk full"), {"failed": "disk full"}),
        (errors.AgentUnavailable("gone"), {"failed": "gone"}),
    ],
)
async def test_what_stands_in_the_way_of_a_snapshot_fails_no_warm_up(
    rig: Rig, error: errors.SnapshotterError, told: object
) -> None:
    rig.fleet.refusal = error
    report = await rig.warm_up.run(rig.deploy())
    assert (report["start_kind"], report["snapshot"]) == ("FORK", told)


async def test_no_snapshot_is_asked_for_where_it_is_off_or_not_wanted(rig: Rig) -> None:
    report = await rig.warm_up.run(rig.deploy(), snapshot=False)
    assert "snapshot" not in report
    report = await rig.warm_up.run(rig.deploy(revision="v2-fedcba", snapshots=False))
    assert "pilotlight snapshot enable shop/hello" in report["snapshot"]["off"]
    rig.table.apply(change(99, route_of(spec_of("cold", snapshot=False))))
    report = await rig.warm_up.run(rig.table.targets_of(f"{TENANT}/main/shop/cold")[0])
    assert (report["start_kind"], report["snapshot"]) == (
        "COLD",
        {"off": "the function sets snapshot=False"},
    )
    assert rig.fleet.snapshots == {}


async def test_starts_after_a_switch_launch_what_it_says_without_losing_their_instances(
    rig: Rig,
) -> None:
    throttler = await warmed(rig, rig.deploy())
    rig.deploy(snapshots=False)
    assert rig.scaler.throttler_of(rig.deploy(snapshots=False)) is throttler
    throttler.start(1)
    await until(lambda: len(throttler.instances) == 2)
    assert [launch.snapshot for launch in rig.fleet.launched] == [True, False]


async def test_the_expected_start_follows_the_templates_coming_and_going(rig: Rig) -> None:
    throttler = await warmed(rig, rig.deploy())
    key = throttler.target.key
    watching = asyncio.create_task(rig.reconciler.watch())
    throttler.start_times.snapshot_proven(0.12)
    throttler.start_times.observe(StartKind.COLD, 5.4, ())
    throttler.start_times.observe(StartKind.FORK, 0.02, ("fork",))
    assert throttler.expected_start_s() == pytest.approx(0.02)

    rig.fleet.tell("template_gone", key)
    await until(lambda: throttler.start_times.next_rung() is StartKind.COLD)
    rig.fleet.tell("template_ready", key)
    await until(lambda: throttler.start_times.next_rung() is StartKind.FORK)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_an_instance_that_was_restored_says_so(rig: Rig) -> None:
    target = rig.deploy()
    await rig.warm_up.run(target)
    throttler = rig.scaler.throttler_of(target)
    for instance in list(throttler.instances.values()):
        throttler.drain(instance)
    await until(lambda: not rig.fleet.infos)
    await rig.fleet.drop_template(target.launch.revision)

    reservation = await throttler.reserve(5.0)
    assert reservation.start_kind is StartKind.RESTORE
    reservation.release()


async def test_a_reserved_instance_owes_for_its_idle_time_from_the_first_second(rig: Rig) -> None:
    target = rig.deploy(Scaling(min_instances=1))
    throttler = rig.scaler.throttler_of(target)
    await until(lambda: len(throttler.instances) == 1)
    throttler.settle_idle()
    throttler.settle_idle()
    await rig.books.shipper.flush()

    assert {record.kind for record in rig.ledger.records.values()} == {"START", "RESERVED"}


async def test_states_are_counted_for_metrics(rig: Rig) -> None:
    throttler = rig.scaler.throttler_of(rig.deploy())
    reservation = await throttler.reserve(5.0)

    states = rig.scaler.states()

    assert states[TENANT, "shop", "hello", "busy"] == 1
    assert states[TENANT, "shop", "hello", "calls_in_flight"] == 1
    reservation.release()


async def warmed(rig: Rig, target: CallTarget) -> Throttler:
    """A throttler with one instance and a Template behind it."""
    throttler = rig.scaler.throttler_of(target)
    (await throttler.reserve(5.0)).release()
    return throttler


async def test_the_template_of_a_replaced_revision_goes_with_its_last_instance(rig: Rig) -> None:
    throttler = rig.scaler.throttler_of(rig.deploy())
    last_call = await throttler.reserve(5.0)
    rig.deploy(revision="v2-fedcba")
    rig.pass_s(4)
    assert rig.fleet.dropped == []

    last_call.release()
    rig.pass_s(4)
    await until(lambda: rig.fleet.dropped == ["f-shop-hello@v1-abcdef"])
    assert rig.fleet.prepared == set()


async def test_a_template_that_nobody_called_lately_goes_too(rig: Rig) -> None:
    await warmed(rig, rig.deploy(Scaling(scaledown_window_s=1)))
    rig.pass_s(int(DROP_S) + 4)
    assert (repr(rig.scaler), rig.fleet.dropped) == ("<AutoscalerLoop 0 active revisions>", [])

    rig.table.apply(FeedChange(seq=9, kind="function", key=f"{TENANT}/main/shop/hello", value=None))
    await until(lambda: rig.fleet.dropped == ["f-shop-hello@v1-abcdef"])


async def test_a_stopped_app_keeps_no_template(rig: Rig) -> None:
    await warmed(rig, rig.deploy())
    route = replace(route_of(spec_of()), stopped=True)
    rig.table.apply(change(9, route))
    rig.pass_s(4)

    await until(lambda: rig.fleet.dropped == ["f-shop-hello@v1-abcdef"])


async def test_a_change_that_keeps_a_revision_in_traffic_keeps_its_template(rig: Rig) -> None:
    await warmed(rig, rig.deploy())
    rig.deploy(Scaling(max_instances=7))
    rig.pass_s(4)
    await asyncio.sleep(0)

    assert rig.fleet.dropped == []


async def test_a_revision_that_is_rolled_back_to_while_its_last_call_runs_is_kept(rig: Rig) -> None:
    throttler = rig.scaler.throttler_of(rig.deploy())
    last_call = await throttler.reserve(5.0)
    rig.deploy(revision="v2-fedcba")
    rig.deploy()
    last_call.release()
    rig.pass_s(4)
    await until(lambda: rig.fleet.dropped == ["f-shop-hello@v2-fedcba"])

    (await throttler.reserve(5.0)).release()
    assert (throttler.is_retired, len(throttler.instances)) == (False, 1)


async def test_templates_of_revisions_that_left_while_no_activator_ran_go_at_its_start(
    rig: Rig,
) -> None:
    await rig.fleet.prepare(rig.deploy())
    rig.scaler.reconciled.clear()
    kept = rig.deploy(revision="v2-fedcba")
    await rig.fleet.prepare(kept)
    assert rig.fleet.dropped == []

    await rig.reconciler.reconcile()
    await until(lambda: rig.fleet.dropped == ["f-shop-hello@v1-abcdef"])
    assert rig.fleet.prepared == {kept.key}


def in_rollout(
    rig: Rig, weights: dict[str, int], *, stable: str = "v1-abcdef"
) -> dict[str, Throttler]:
    """A rollout's document takes effect; the throttlers of its revisions."""
    spec = spec_of(scaling=Scaling(max_inputs=1, max_instances=6, scaledown_window_s=4))
    routes = {name: route_of(spec, revision=name) for name in {stable, *weights} - {""}}
    document = with_weights(TrafficDocument(stable=stable), weights)
    route = replace(
        next(iter(routes.values())),
        traffic=tuple(weights.items()),
        revisions={name: one.revisions[name] for name, one in routes.items()},
        document=to_json(document),
    )
    rig.seq += 1
    rig.table.apply(change(rig.seq, route))
    return {
        target.revision: rig.scaler.throttler_of(target)
        for target in rig.table.targets_of(f"{TENANT}/main/shop/hello")
    }


async def test_a_rollout_keeps_one_instance_of_stable_warm_though_nobody_calls_it(rig: Rig) -> None:
    rig.scaler.reconciled.set()
    both = in_rollout(rig, {"v1-abcdef": 95, "v2-fedcba": 5})
    await until(lambda: len(both["v1-abcdef"].instances) == 1)

    in_rollout(rig, {"v2-fedcba": 100})
    rig.pass_s(200)

    assert (len(both["v1-abcdef"].instances), both["v1-abcdef"].is_retired) == (1, False)


async def test_a_revision_that_was_scaled_before_its_rollout_began_is_kept_warm_too(
    rig: Rig,
) -> None:
    throttler = rig.scaler.throttler_of(rig.deploy(Scaling(scaledown_window_s=4)))
    (await throttler.reserve(5.0)).release()
    rig.scaler.reconciled.set()
    in_rollout(rig, {"v1-abcdef": 95, "v2-fedcba": 5})
    rig.pass_s(200)

    assert len(throttler.instances) == 1


async def test_stable_has_room_for_the_candidates_calls(rig: Rig) -> None:
    rig.scaler.reconciled.set()
    both = in_rollout(rig, {"v2-fedcba": 100})
    calls = [await both["v2-fedcba"].reserve(5.0) for _ in range(3)]
    rig.pass_s(10)
    await until(lambda: len(both["v1-abcdef"].instances) == 3)

    for call in calls:
        call.release()
    in_rollout(rig, {"v1-abcdef": 100}, stable="")  # rolled back
    again = [both["v1-abcdef"].reserve_nowait() for _ in range(3)]

    assert all(reservation is not None for reservation in again)
    for reservation in again:
        assert reservation is not None
        reservation.release()


async def test_a_call_that_was_to_be_served_at_once_and_was_not_gets_an_instance(rig: Rig) -> None:
    throttler = rig.scaler.throttler_of(rig.deploy(Scaling(max_inputs=1, max_instances=3)))
    throttler.start_times.observe(StartKind.COLD, 0.05, ())
    for _ in range(4):  # calls are over long before an instance could be there
        reservation = await throttler.reserve(5.0)
        rig.clock.advance(0.001)
        reservation.release()
    long = await throttler.reserve(5.0)
    waiting = asyncio.create_task(throttler.reserve(5.0))
    await asyncio.sleep(0)
    assert throttler.starting == 0
    rig.clock.advance(0.05)

    (await waiting).release()
    assert len(throttler.instances) == 2
    long.release()
