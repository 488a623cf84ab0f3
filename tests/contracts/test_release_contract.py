"""Releases: the same promises on SQLite and on PostgreSQL."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from pilotlight.controller.database import feed, tables
from pilotlight.controller.database.store import Store
from pilotlight.controller.deployments import app_registry, releases
from pilotlight.controller.deployments.releases import ReleaseOptions, ReleaseStage
from pilotlight.controller.identity import tenants
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.registry.revisions import RevisionMetadata
from pilotlight.controller.release import (
    aliases,
    app_history,
    approvals,
    revision_manifests,
    traffic,
)
from pilotlight.controller.rollouts.plan import RolloutPlan
from pilotlight.errors import ApprovalRequired, Conflict
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.record_json import from_json
from tests.functions.controller.parts import spec


@pytest.fixture(name="place")
def _place(store: Store) -> AppRef:
    with store.write() as write:
        tenant = tenants.create(write, name="default", uid_base=20_000, actor="platform")
        tenants.create_environment(write, tenant=tenant.id, name="staging", actor="platform")
    return AppRef(
        tenant=tenant.id, uid=tenant.uid, environment="staging", app="search", actor="k-1"
    )


def deploy(
    store: Store, place: AppRef, number: int, **terms: Any
) -> app_registry.FunctionDeployment:
    body = from_json(FunctionSpec, spec(description=f"number {number}"))
    with store.write() as write:
        (done,) = app_registry.deploy(
            write, place, specs=[body], terms=ReleaseOptions(**terms)
        ).functions
    return done


def weights(store: Store, place: AppRef) -> dict[str, int]:
    with store.read() as sql:
        return {
            name.partition("-")[0]: weight
            for name, weight in traffic.find(sql, place, "hello").weights.items()
        }


def test_a_release_waits_is_approved_serves_and_goes_back(store: Store, place: AppRef) -> None:
    deploy(store, place, 1)
    with store.write() as write:
        approvals.set_policy(write, place, approvals=1)
    second = deploy(
        store,
        place,
        2,
        metadata=RevisionMetadata(lineage={"git.commit": "a"}, evaluation={"accuracy": 0.5}),
    )
    assert (second.stage, second.approvals) == (ReleaseStage.WAITING, 1)
    with pytest.raises(ApprovalRequired), store.write() as write:
        releases.promote(write, place, function="hello", reference="v2", terms=ReleaseOptions())
    with pytest.raises(Conflict), store.write() as write:
        approvals.approve(write, place, function="hello", revision=second.revision)
    with store.write() as write:
        assert (
            approvals.approve(
                write, replace(place, actor="k-2"), function="hello", revision=second.revision
            )
            == 0
        )
        told = RevisionMetadata(lineage={"git.commit": "b"}, evaluation={"accuracy": 0.9})
        assert (
            releases.promote(
                write, place, function="hello", reference="v2", terms=ReleaseOptions(metadata=told)
            )[0]
            == second.revision
        )
    assert weights(store, place) == {"v2": 100}
    with store.write() as write:
        aliases.set_alias(write, place, function="hello", alias="blessed", reference="v2")
        releases.rollback(write, place, function="hello")
    assert weights(store, place) == {"v1": 100}
    with store.read() as sql:
        listed = {row["ordinal"]: row for row in revision_manifests.listing(sql, place, "hello")}
        assert (listed[1]["aliases"], listed[2]["aliases"]) == (["stable"], ["blessed"])
        assert (listed[2]["lineage"], listed[2]["evaluation"]) == (
            {"git.commit": "a"},
            {"accuracy": 0.9},
        )
        entries = app_history.entries(
            sql, tenant=place.tenant, environment="staging", app="search", limit=9
        )
    assert [entry["action"] for entry in entries] == ["rollback", "promote", "deploy", "deploy"]


def published(store: Store, place: AppRef) -> dict[str, Any]:
    """What activators are told of the function."""
    with store.read() as sql:
        page = feed.read(sql, after=0, limit=100)
    routes = [json.loads(text) for text in page.changes]
    return next(dict(one["value"]) for one in routes if one["kind"] == feed.FUNCTION)


def cutover(store: Store, place: AppRef) -> tuple[dict[str, int], list[str]]:
    """(who answers, who is awaited), as published, by number."""
    document = published(store, place)["document"]
    before = {name.partition("-")[0]: weight for name, weight in document["previous"].items()}
    return before, [name.partition("-")[0] for name in document["awaited"]]


def test_a_route_names_who_answered_before_until_the_new_revision_ran(
    store: Store, place: AppRef
) -> None:
    function = place.function_id("hello")

    def ran(*revisions: str) -> None:
        with store.write() as write:
            traffic.record_served(write, {(function, name) for name in revisions})

    deploy(store, place, 0)
    first = deploy(store, place, 1)
    assert cutover(store, place) == ({}, ["v2"])  # nobody ever called
    ran(first.revision)
    second = deploy(store, place, 2)
    assert cutover(store, place) == ({"v2": 100}, ["v3"])
    assert set(published(store, place)["revisions"]) == {first.revision, second.revision}
    ran(first.revision)  # calls that the first one answers meanwhile
    third = deploy(store, place, 3)  # before the second ever ran
    assert cutover(store, place) == ({"v2": 100}, ["v4"])
    generation = published(store, place)["document"]["generation"]
    ran(second.revision, third.revision)
    assert cutover(store, place) == ({}, [])
    assert published(store, place)["document"]["generation"] == generation
    assert set(published(store, place)["revisions"]) == {third.revision}
    with store.write() as write:
        releases.rollback(write, place, function="hello")
    assert cutover(store, place) == ({}, [])  # nobody wants answers of what was bad


def test_an_environment_goes_with_all_that_was_said_of_its_releases(
    store: Store, place: AppRef
) -> None:
    deploy(store, place, 1)
    second = deploy(store, place, 2, plan=RolloutPlan(steps=(10, 100)))
    assert second.stage == ReleaseStage.ROLLOUT
    with store.write() as write:
        approvals.approve(
            write, replace(place, actor="k-2"), function="hello", revision=second.revision
        )
        aliases.set_alias(write, place, function="hello", alias="blessed", reference="v1")
        app_registry.delete(write, place)
    with store.write() as write:
        tenants.delete_environment(write, tenant=place.tenant, name="staging", actor="k-1")
        for table in (
            tables.revisions,
            tables.approvals,
            tables.aliases,
            tables.rollouts,
            tables.rollout_decisions,
        ):
            assert (
                write.sql.execute(sa.select(sa.func.count()).select_from(table)).scalar_one() == 0
            )


def test_a_function_whose_first_revision_waits_is_shown_and_can_go(
    store: Store, place: AppRef
) -> None:
    deploy(store, place, 1)
    with store.write() as write:
        approvals.set_policy(write, place, approvals=2)
        body = [from_json(FunctionSpec, spec(name)) for name in ("hello", "other")]
        assert app_registry.deploy(write, place, specs=body).functions[1].approvals == 2
    with store.read() as sql:
        app = app_registry.app(sql, tenant=place.tenant, environment="staging", name="search")
        assert [(one["name"], len(one["traffic"])) for one in app["functions"]] == [
            ("hello", 1),
            ("other", 0),
        ]
    with store.write() as write:
        app_registry.stop(write, place)
        assert len(app_registry.delete(write, place)) == 2
