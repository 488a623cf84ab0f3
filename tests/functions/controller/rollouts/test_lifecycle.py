"""A rollout over its life: each step is one transaction, a kill between two of them loses nothing,
and an operator's hand comes first."""

from __future__ import annotations

import dataclasses
import json

import pytest
import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.deployments import app_registry
from pilotlight.controller.release import traffic
from pilotlight.controller.rollouts import lifecycle
from pilotlight.controller.rollouts.loop import NOTE_EVERY_S, RolloutController
from pilotlight.controller.rollouts.plan import Gate
from pilotlight.controller.rollouts.records import Decision, RolloutState, Verdict
from pilotlight.errors import Conflict, NotFound
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.record_json import from_json
from tests.functions.controller.parts import spec
from tests.functions.controller.rollouts.conftest import PLAN, World


def test_a_good_candidate_takes_over_step_by_step(world: World) -> None:
    rollout = world.begin()
    seen = [world.weights[world.candidate]]
    for _ in PLAN.steps:
        world.pass_s(61)
        world.see_both()
        world.look()
        seen.append(world.weights[world.candidate])
    assert seen == [5, 50, 100, 100]
    assert (world.rollout(rollout).state, world.document.stable) == (RolloutState.DONE, "")
    assert world.told() == [
        "rollout.started",
        "rollout.advanced",
        "rollout.advanced",
        "rollout.done",
    ]


def test_stable_keeps_its_room_until_the_rollout_is_done(world: World) -> None:
    world.begin()
    assert world.document.stable == world.stable
    for _ in range(2):
        world.pass_s(61)
        world.see_both()
        world.look()
    assert world.weights == {world.candidate: 100}
    assert world.document.stable == world.stable


def test_a_bad_candidate_goes_back_in_its_first_step(world: World) -> None:
    rollout = world.begin()
    world.pass_s(5)
    world.see_both(failed=20)
    world.look()
    assert world.weights == {world.stable: 100}
    assert (world.rollout(rollout).state, world.document.stable) == (RolloutState.ROLLED_BACK, "")
    assert world.told()[-1] == "rollout.rolled_back"
    last = world.decisions(rollout)[0]
    assert (last.verdict, last.action) == ("rollback", "weight 0")
    assert "burn-rate" in last.reasons[0]
    assert last.evidence["gates"][0]["samples"] == 500


def test_both_bad_leaves_the_traffic_with_stable_and_tells(world: World) -> None:
    rollout = world.begin()
    world.see(world.candidate, 100, failed=50)
    world.see(world.stable, 1900, failed=950)
    world.look()
    assert (world.rollout(rollout).state, world.weights) == (
        RolloutState.HALTED,
        {world.stable: 100},
    )
    assert world.told()[-1] == "rollout.halted"


def test_a_killed_controller_goes_on_at_the_step_where_it_was(world: World) -> None:
    rollout = world.begin()
    world.pass_s(61)
    world.see_both()
    world.look()
    world.restart()
    assert world.look() == 1  # a hold, since nothing was seen in this step
    assert (world.rollout(rollout).step, world.weights[world.candidate]) == (1, 50)
    world.pass_s(61)
    world.see_both()
    world.look()
    assert world.rollout(rollout).step == 2


def test_a_step_that_dies_before_its_commit_left_nothing_behind(world: World) -> None:
    rollout = world.rollout(world.begin())
    decision = Decision(verdict=Verdict.ADVANCE, cause="passed", reasons=(), weight=50)

    def die_within() -> None:
        with world.store.write() as write:
            lifecycle.follow(write, rollout, decision)
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        die_within()
    assert (
        world.rollout(rollout.id).step,
        world.weights[world.candidate],
        len(world.decisions(rollout.id)),
    ) == (0, 5, 1)


def test_what_was_judged_before_somebody_else_moved_it_changes_nothing(world: World) -> None:
    stale = world.rollout(world.begin())
    decision = Decision(verdict=Verdict.ADVANCE, cause="passed", reasons=(), weight=50)
    with world.store.write() as write:
        assert lifecycle.follow(write, stale, decision)
    with world.store.write() as write:
        assert not lifecycle.follow(write, stale, decision)
    assert (world.rollout(stale.id).step, world.weights[world.candidate]) == (1, 50)


@pytest.mark.parametrize("jump_s", [-7200.0, 7200.0])
def test_a_clock_that_was_set_does_not_shorten_a_step(world: World, jump_s: float) -> None:
    rollout = world.begin()
    world.see_both()
    world.look()
    world.clock.now += jump_s
    world.look()
    assert world.rollout(rollout).step_began_at == world.clock.now
    assert world.decisions(rollout)[0].reasons == ("the clock was changed: the step restarts",)
    world.pass_s(30)
    world.see_both()
    world.look()
    assert world.rollout(rollout).step == 0
    world.pass_s(31)
    world.see_both()
    world.look()
    assert world.rollout(rollout).step == 1


def test_a_clock_that_was_set_back_while_the_controller_was_away_begins_the_step_anew(
    world: World,
) -> None:
    rollout = world.begin()
    world.clock.now -= 3600
    world.restart()
    world.look()
    assert world.rollout(rollout).step_began_at == world.clock.now


def test_calls_of_the_same_minute_before_a_step_are_no_evidence_for_it(world: World) -> None:
    world.clock.now = 1_800_000_000.0  # a minute begins
    rollout = world.begin(dataclasses.replace(PLAN, every_s=5))
    world.pass_s(10)
    world.see_both()
    world.look()
    assert world.rollout(rollout).step == 1
    world.pass_s(10)
    world.look()
    assert (world.rollout(rollout).step, world.decisions(rollout)[0].evidence["cause"]) == (
        1,
        "no_traffic",
    )


def test_a_candidate_that_never_gets_traffic_is_told_once(world: World) -> None:
    rollout = world.begin()
    for _ in range(30):
        world.pass_s(60)
        world.see(world.stable, 100)
        world.look()
    assert (world.rollout(rollout).step, world.weights[world.candidate]) == (0, 5)
    assert world.told() == ["rollout.started", "rollout.held"]


def test_metrics_that_are_missing_for_a_step_hold_it(world: World) -> None:
    rollout = world.begin()
    world.pass_s(61)
    world.see_both()
    world.look()
    for _ in range(10):
        world.pass_s(60)
        world.look()
    assert (world.rollout(rollout).step, world.rollout(rollout).state) == (1, RolloutState.RUNNING)


def test_a_hold_is_stored_when_it_changes_and_once_a_minute(world: World) -> None:
    world.begin()
    world.see(world.candidate, 10)
    world.see(world.stable, 10)
    assert [world.look(), world.look()] == [1, 0]
    world.pass_s(NOTE_EVERY_S)
    assert [world.look(), world.look()] == [1, 0]


def test_weights_that_were_set_by_hand_end_the_rollout(world: World) -> None:
    rollout = world.begin()
    with world.store.write() as write:
        traffic.change(
            write,
            world.place,
            "hello",
            lambda d: dataclasses.replace(d, weights={world.stable: 70, world.candidate: 30}),
            action="traffic.set",
        )
    world.look()
    assert (world.rollout(rollout).state, world.weights[world.candidate]) == (
        RolloutState.SUPERSEDED,
        30,
    )
    assert world.document.stable == ""


def test_a_cap_on_the_blast_radius_holds_it_and_says_so(world: World) -> None:
    with world.store.write() as write:
        traffic.change(
            write,
            world.place,
            "hello",
            lambda d: dataclasses.replace(d, max_candidate=10),
            action="traffic.set",
        )
    rollout = world.begin()
    world.pass_s(61)
    world.see_both()
    assert [world.look(), world.look()] == [1, 0]
    assert (world.rollout(rollout).step, world.decisions(rollout)[0].evidence["cause"]) == (
        0,
        "refused",
    )
    assert "max_candidate" in world.decisions(rollout)[0].reasons[0]


def test_a_function_that_is_gone_has_no_rollout(world: World) -> None:
    rollout = world.begin()
    with world.store.write() as write:
        app_registry.delete(write, world.place)
    world.look()
    assert world.rollout(rollout).state is RolloutState.SUPERSEDED


def test_another_candidate_supersedes_the_first_and_stable_stays_stable(world: World) -> None:
    first, candidate = world.begin(), third(world)
    with world.store.write() as write:
        plan = dataclasses.replace(PLAN, steps=(10, 100))
        second = lifecycle.begin(
            write, world.place, function="hello", candidate=candidate, plan=plan
        )
    assert world.rollout(first).state is RolloutState.SUPERSEDED
    assert (world.rollout(second).stable, world.weights[world.stable], world.document.stable) == (
        world.stable,
        90,
        world.stable,
    )


def third(world: World) -> str:
    """One more revision, without traffic."""
    with world.store.read() as sql:
        found = (
            sql.execute(
                sa.select(tables.revisions).where(tables.revisions.c.name == world.candidate)
            )
            .mappings()
            .one()
        )
    with world.store.write() as write:
        write.sql.execute(
            sa.insert(tables.revisions).values(
                **{**found, "name": "v9-abcdef", "digest": "another", "ordinal": 9}
            )
        )
    return "v9-abcdef"


def test_what_serves_already_is_no_candidate(world: World) -> None:
    with pytest.raises(Conflict, match="already serves"), world.store.write() as write:
        lifecycle.begin(write, world.place, function="hello", candidate=world.stable, plan=PLAN)
    with pytest.raises(NotFound), world.store.write() as write:
        lifecycle.begin(write, world.place, function="hello", candidate="v99-nobody", plan=PLAN)


def test_the_alarm_counts_against_the_functions_own_objective(world: World) -> None:
    with world.store.write() as write:
        body = spec(resources={"cpu": 2.0}, objectives={"availability": 0.9})
        text = sa.update(tables.revisions).where(tables.revisions.c.name == world.candidate)
        assert from_json(FunctionSpec, body).objectives is not None
        write.sql.execute(text.values(spec=json.dumps(body)))
    assert (
        world.rollout(
            world.begin(dataclasses.replace(PLAN, gates=(Gate(metric="latency_p99"),)))
        ).plan.availability
        == 0.9
    )


def test_by_hand_it_is_paused_resumed_promoted_and_aborted(world: World) -> None:
    rollout = world.rollout(world.begin())
    with world.store.write() as write:
        lifecycle.pause(write, rollout, world.place)
    world.pass_s(61)
    world.see_both()
    world.look()
    paused = world.rollout(rollout.id)
    assert (paused.state, paused.step) == (RolloutState.PAUSED, 0)
    with world.store.write() as write:
        lifecycle.resume(write, paused, world.place)
    world.look()
    running = world.rollout(rollout.id)
    assert (running.state, running.step) == (RolloutState.RUNNING, 1)
    with world.store.write() as write:
        lifecycle.abort(write, running, world.place)
    aborted = world.rollout(rollout.id)
    assert (aborted.state, world.weights) == (RolloutState.ABORTED, {world.stable: 100})
    with pytest.raises(Conflict, match="has ended"), world.store.write() as write:
        lifecycle.promote(write, aborted, world.place)
    again = world.rollout(world.begin())
    with world.store.write() as write:
        lifecycle.promote(write, again, world.place)
    assert (world.rollout(again.id).state, world.weights, world.document.stable) == (
        RolloutState.DONE,
        {world.candidate: 100},
        "",
    )


def test_a_rollback_elsewhere_ends_it_and_the_weights_are_left_alone(world: World) -> None:
    rollout = world.begin()
    with world.store.write() as write:
        assert (
            lifecycle.end(write, world.place.function_id("hello"), reason="rolled back") == rollout
        )
        assert lifecycle.end(write, world.place.function_id("hello"), reason="rolled back") is None
    assert (world.weights[world.candidate], world.document.stable) == (5, "")


def test_the_history_and_the_audit_log_have_every_step(world: World) -> None:
    world.begin()
    world.pass_s(5)
    world.see_both(failed=50)
    world.look()
    with world.store.read() as sql:
        actions = (
            sql.execute(
                sa.select(tables.deployments.c.action).order_by(tables.deployments.c.version)
            )
            .scalars()
            .all()
        )
        audited = sql.execute(
            sa.select(tables.audit.c.action, tables.audit.c.actor).order_by(tables.audit.c.id)
        ).all()
    assert actions[-2:] == ["rollout.start", "rollout.rollback"]
    assert [tuple(row) for row in audited[-2:]] == [
        ("rollout.start", "k-1"),
        ("rollout.rollback", "platform"),
    ]


def test_a_rollout_whose_looks_take_long_is_left_alone_for_a_while(world: World) -> None:
    world.begin()
    steady = iter([0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 10.5, 10.5, 10.5, 10.5])
    keeper = RolloutController(store=world.store, clock=world.clock, monotonic=lambda: next(steady))
    assert keeper.round() == 1  # it took half a second
    world.clock.now += 1
    world.see_both(failed=50)
    assert keeper.round() == 0
    world.clock.now += 9.5
    assert keeper.round() == 1
    assert world.weights == {world.stable: 100}


def test_a_rollout_that_is_broken_holds_up_no_other(world: World) -> None:
    good = world.begin()
    place = dataclasses.replace(world.place, app="other")
    with world.store.write() as write:
        names = [
            app_registry.deploy(
                write, place, specs=[from_json(FunctionSpec, spec(resources={"cpu": cpu}))]
            )
            .functions[0]
            .revision
            for cpu in (2.0, 1.0)
        ]
        broken = lifecycle.begin(write, place, function="hello", candidate=names[0], plan=PLAN)
        mine = tables.rollout_decisions.c.rollout == broken
        write.sql.execute(sa.update(tables.rollout_decisions).where(mine).values(evidence="{"))
    world.see_both()
    world.pass_s(PLAN.every_s)
    assert world.look() == 1
    assert (world.rollout(good).step, world.rollout(broken).step) == (1, 0)
