"""Releases: the same promises on SQLite and on PostgreSQL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from pilotlight.controller import (
    aliases,
    approvals,
    history,
    manifests,
    registry,
    releases,
    tables,
    tenants,
    traffic,
)
from pilotlight.controller.places import Place
from pilotlight.controller.releases import Stage, Terms
from pilotlight.controller.revisions import Told
from pilotlight.controller.rollouts.plan import Plan
from pilotlight.controller.store import Store
from pilotlight.errors import ApprovalRequired, Conflict
from pilotlight.spec import FunctionSpec, from_json
from tests.functions.controller.parts import spec


@pytest.fixture(name="place")
def _place(store: Store) -> Place:
    with store.write() as write:
        tenant = tenants.create(write, name="default", uid_base=20_000, actor="platform")
        tenants.create_environment(write, tenant=tenant.id, name="staging", actor="platform")
    return Place(tenant=tenant.id, uid=tenant.uid, environment="staging", app="search", actor="k-1")


def deploy(store: Store, place: Place, number: int, **terms: Any) -> registry.Deployed:
    body = from_json(FunctionSpec, spec(description=f"number {number}"))
    with store.write() as write:
        (done,) = registry.deploy(write, place, specs=[body], terms=Terms(**terms)).functions
    return done


def weights(store: Store, place: Place) -> dict[str, int]:
    with store.read() as sql:
        return {
            name.partition("-")[0]: weight
            for name, weight in traffic.find(sql, place, "hello").weights.items()
        }


def test_a_release_waits_is_approved_serves_and_goes_back(store: Store, place: Place) -> None:
    deploy(store, place, 1)
    with store.write() as write:
        approvals.protect(write, place, approvals=1)
    second = deploy(
        store, place, 2, told=Told(lineage={"git.commit": "a"}, evaluation={"accuracy": 0.5})
    )
    assert (second.stage, second.approvals) == (Stage.WAITING, 1)
    with pytest.raises(ApprovalRequired), store.write() as write:
        releases.promote(write, place, function="hello", reference="v2", terms=Terms())
    with pytest.raises(Conflict), store.write() as write:
        approvals.approve(write, place, function="hello", revision=second.revision)
    with store.write() as write:
        assert (
            approvals.approve(
                write, replace(place, actor="k-2"), function="hello", revision=second.revision
            )
            == 0
        )
        told = Told(lineage={"git.commit": "b"}, evaluation={"accuracy": 0.9})
        assert (
            releases.promote(
                write, place, function="hello", reference="v2", terms=Terms(told=told)
            )[0]
            == second.revision
        )
    assert weights(store, place) == {"v2": 100}
    with store.write() as write:
        aliases.move(write, place, function="hello", alias="blessed", reference="v2")
        releases.rollback(write, place, function="hello")
    assert weights(store, place) == {"v1": 100}
    with store.read() as sql:
        listed = {row["ordinal"]: row for row in manifests.listing(sql, place, "hello")}
        assert (listed[1]["aliases"], listed[2]["aliases"]) == (["stable"], ["blessed"])
        assert (listed[2]["lineage"], listed[2]["evaluation"]) == (
            {"git.commit": "a"},
            {"accuracy": 0.9},
        )
        entries = history.entries(
            sql, tenant=place.tenant, environment="staging", app="search", limit=9
        )
    assert [entry["action"] for entry in entries] == ["rollback", "promote", "deploy", "deploy"]


def test_an_environment_goes_with_all_that_was_said_of_its_releases(
    store: Store, place: Place
) -> None:
    deploy(store, place, 1)
    second = deploy(store, place, 2, plan=Plan(steps=(10, 100)))
    assert second.stage == Stage.ROLLOUT
    with store.write() as write:
        approvals.approve(
            write, replace(place, actor="k-2"), function="hello", revision=second.revision
        )
        aliases.move(write, place, function="hello", alias="blessed", reference="v1")
        registry.delete(write, place)
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
    store: Store, place: Place
) -> None:
    deploy(store, place, 1)
    with store.write() as write:
        approvals.protect(write, place, approvals=2)
        body = [from_json(FunctionSpec, spec(name)) for name in ("hello", "other")]
        assert registry.deploy(write, place, specs=body).functions[1].approvals == 2
    with store.read() as sql:
        app = registry.app(sql, tenant=place.tenant, environment="staging", name="search")
        assert [(one["name"], len(one["traffic"])) for one in app["functions"]] == [
            ("hello", 1),
            ("other", 0),
        ]
    with store.write() as write:
        registry.stop(write, place)
        assert len(registry.delete(write, place)) == 2
