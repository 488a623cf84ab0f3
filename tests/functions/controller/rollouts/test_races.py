"""Rollouts beside everything else that moves a function's traffic: whatever comes, nothing is stuck
and the way back is not forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pilotlight.controller.deployments import app_registry, releases
from pilotlight.controller.deployments.releases import ReleaseOptions
from pilotlight.controller.experiments import design
from pilotlight.controller.experiments import lifecycle as experiments
from pilotlight.controller.release import aliases, approvals, traffic
from pilotlight.controller.rollouts import repository
from pilotlight.errors import Conflict, PilotlightError
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.record_json import from_json
from tests.functions.controller.parts import spec
from tests.functions.controller.rollouts.conftest import PLAN, World


def deploy(world: World, cpu: float, **terms: object) -> str:
    with world.store.write() as write:
        parsed = from_json(FunctionSpec, spec(resources={"cpu": cpu}))
        done = app_registry.deploy(
            write,
            world.place,
            specs=[parsed],
            terms=ReleaseOptions(**terms),  # type: ignore[arg-type]
        )
    return done.functions[0].revision


def is_over(world: World, rollout: str) -> None:
    """It ended, nothing keeps a way back, and no second look finds anything to do."""
    assert world.rollout(rollout).finished_at is not None
    assert world.document.stable == ""
    assert (world.look(), world.look()) == (0, 0)


def test_a_deploy_at_once_takes_over_from_a_rollout(world: World) -> None:
    rollout = world.begin()
    newest = deploy(world, 4.0)
    assert world.weights == {newest: 100}
    is_over(world, rollout)


def test_stable_deployed_again_ends_the_rollout_and_has_everything(world: World) -> None:
    rollout = world.begin()
    assert deploy(world, 1.0) == world.stable
    assert world.weights == {world.stable: 100}
    is_over(world, rollout)


def test_the_candidate_deployed_again_goes_on_where_it_is_and_step_by_step_begins_anew(
    world: World,
) -> None:
    rollout = world.begin()
    assert deploy(world, 2.0) == world.candidate
    assert world.weights[world.candidate] == 5
    assert world.rollout(rollout).finished_at is None
    deploy(world, 2.0, plan=PLAN)
    assert world.rollout(rollout).finished_at is not None
    assert (world.weights[world.candidate], world.document.stable) == (5, world.stable)
    with world.store.read() as sql:
        assert len(repository.active(sql)) == 1


def test_a_stopped_and_a_deleted_app_leave_no_rollout_behind(world: World) -> None:
    rollout = world.begin()
    with world.store.write() as write:
        app_registry.stop(write, world.place)
    world.pass_s(30)
    world.look()
    assert world.rollout(rollout).finished_at is None, "it waits for the app"
    with world.store.write() as write:
        app_registry.delete(write, world.place)
    assert world.rollout(rollout).finished_at is not None
    assert world.look() == 0
    newest = deploy(world, 8.0)
    assert (world.weights, world.document.stable, world.document.tags) == ({newest: 100}, "", {})


def test_while_a_rollout_runs_no_experiment_begins_and_the_other_way_round(world: World) -> None:
    arms = [
        {"name": "a", "revision": world.stable, "share": 50},
        {"name": "b", "revision": world.candidate, "share": 50},
    ]
    plan = design.parse(unit="key", percent=50, arms=arms, guardrails=[], salt="s")
    world.begin()
    with world.store.write() as write:
        made = experiments.create(write, world.place, function="hello", name="x", design=plan)
        with pytest.raises(Conflict, match="rollout"):
            experiments.start(write, world.place, made)
    with world.store.write() as write:
        releases.rollback(write, world.place, function="hello")
        experiments.start(write, world.place, made)
    with pytest.raises(Conflict, match="experiment 'x' runs"):
        world.begin()
    with world.store.read() as sql:
        assert repository.active(sql) == []


def test_an_experiment_that_was_stopped_is_concluded_during_a_rollout_and_ends_it(
    world: World,
) -> None:
    arms = [
        {"name": "a", "revision": world.stable, "share": 50},
        {"name": "b", "revision": world.candidate, "share": 50},
    ]
    plan = design.parse(unit="key", percent=50, arms=arms, guardrails=[], salt="s")
    with world.store.write() as write:
        made = experiments.create(write, world.place, function="hello", name="x", design=plan)
        started = experiments.start(write, world.place, made)
        stopped = experiments.halt(write, world.place, started, reason="enough")
    rollout = world.begin()
    with world.store.write() as write:
        experiments.conclude(write, world.place, stopped, arm="b")
    world.look()
    assert world.weights == {world.candidate: 100}
    is_over(world, rollout)


def test_a_rollout_of_a_revision_whose_approval_is_demanded_meanwhile_still_goes_back(
    world: World,
) -> None:
    rollout = world.begin()
    with world.store.write() as write:
        approvals.set_policy(write, world.place, approvals=3)
    world.see_both(failed=300)
    world.pass_s(5)
    world.look()
    assert world.weights == {world.stable: 100}
    is_over(world, rollout)


def test_a_cap_below_the_step_does_not_stand_in_the_way_back(world: World) -> None:
    rollout = world.begin()
    world.see_both()
    world.pass_s(PLAN.every_s)
    world.look()
    assert world.weights[world.candidate] == 50
    with world.store.write() as write, pytest.raises(PilotlightError):
        traffic.change(
            write,
            world.place,
            "hello",
            lambda document: replace(document, max_candidate=10),
            action="",
        )
    world.see_both(failed=400, candidate=500, stable=500)
    world.pass_s(5)
    world.look()
    assert world.weights == {world.stable: 100}
    is_over(world, rollout)


def test_pins_tags_and_a_shadow_survive_a_rollout(world: World) -> None:
    with world.store.write() as write:
        traffic.change(
            write,
            world.place,
            "hello",
            lambda document: replace(
                document, tags={"next": world.candidate}, pins={"default": world.stable}
            ),
            action="",
        )
    rollout = world.begin()
    with world.store.write() as write:
        releases.rollback(write, world.place, function="hello")
    assert (dict(world.document.tags), dict(world.document.pins)) == (
        {"next": world.candidate},
        {"default": world.stable},
    )
    is_over(world, rollout)


def test_the_alias_candidate_goes_with_the_rollout(world: World) -> None:
    rollout = world.begin()
    function_id = world.place.function_id("hello")
    with world.store.read() as sql:
        assert aliases.aliases_for(sql, function_id) == {
            "stable": world.stable,
            "candidate": world.candidate,
        }
    with world.store.write() as write:
        releases.rollback(write, world.place, function="hello", reference="candidate")
    assert world.weights == {world.candidate: 100}
    with world.store.read() as sql:
        assert aliases.aliases_for(sql, function_id) == {"stable": world.candidate}
    is_over(world, rollout)
