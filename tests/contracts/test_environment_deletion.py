"""An environment is deleted with all that releases left in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store
from pilotlight.controller.deployments import app_registry, releases
from pilotlight.controller.identity import tenants
from pilotlight.controller.registry import feed_publisher
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.rollouts import lifecycle
from pilotlight.controller.rollouts.plan import RolloutPlan
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.record_json import canonical_json, from_json, to_json
from tests.functions.controller.parts import ManualClock, spec

PLACE = AppRef(tenant="t-1", uid=20_000, environment="staging", app="search", actor="k-1")
FUNCTION = PLACE.function_id("hello")


@pytest.fixture
def filled(migrated_url: str) -> Iterator[Store]:
    """A store with a function of two revisions that share its traffic."""
    store = Store(migrated_url, clock=ManualClock())
    with store.write() as write:
        _fill(write.sql)
    yield store
    store.close()


def _fill(sql: sa.Connection) -> None:
    at = 1_799_000_000.0
    where = {"tenant": "t-1", "environment": "staging", "app": "search"}
    rows: list[tuple[str, dict[str, Any]]] = [
        ("tenants", {"id": "t-1", "name": "default", "uid": 20_000, "created_at": at}),
        ("environments", {"tenant": "t-1", "name": "staging", "created_at": at}),
        (
            "apps",
            {
                "tenant": "t-1",
                "environment": "staging",
                "name": "search",
                "version": 2,
                "stopped": False,
                "created_at": at,
                "updated_at": at,
            },
        ),
        (
            "functions",
            {
                **where,
                "id": FUNCTION,
                "name": "hello",
                "revisions": 2,
                "created_at": at,
                "snapshots": True,
            },
        ),
    ]
    for number in (1, 2):
        one = from_json(FunctionSpec, spec(description=f"number {number}"))
        name, text = f"v{number}-{one.digest()[:6]}", canonical_json(to_json(one)).decode()
        revision = {
            "function": FUNCTION,
            "name": name,
            "digest": one.digest(),
            "ordinal": number,
            "spec": text,
            "created_at": at + number,
        }
        entry = {
            "version": number,
            "action": "deploy",
            "created_at": at,
            "created_by": "k-1",
            "message": "",
            "labels": "{}",
        }
        done = json.dumps([{"function": "hello", "revision": name, "created": True}])
        rows += [
            ("revisions", revision),
            ("traffic", {"function": FUNCTION, "revision": name, "weight": 50}),
            ("deployments", {**where, **entry, "functions": done}),
        ]
    for table, values in rows:
        sql.execute(
            sa.insert(sa.table(table, *(sa.column(name) for name in values))).values(**values)
        )


def test_an_environment_with_releases_of_every_kind_is_deleted(filled: Store) -> None:
    with filled.write() as write:
        first, second = sorted(feed_publisher.traffic_document(write.sql, FUNCTION).weights)
        releases.rollback(write, PLACE, function="hello", reference=first)
        lifecycle.begin(write, PLACE, function="hello", candidate=second, plan=RolloutPlan())
        row = {"function": FUNCTION, "revision": first}
        write.sql.execute(
            sa.insert(tables.aliases).values(
                **row, name="good", updated_by="k-1", updated_at=write.now
            )
        )
        write.sql.execute(
            sa.insert(tables.approvals).values(**row, actor="k-2", at=write.now, note="")
        )
        alert = {
            "id": "slo-1",
            "tenant": "t-1",
            "function": FUNCTION,
            "sli": "availability",
            "severity": "page",
            "window": "1h/5m",
        }
        write.sql.execute(
            sa.insert(tables.slo_alerts).values(**alert, document="{}", began_at=write.now)
        )
        experiment = {
            "id": "x-1",
            "tenant": "t-1",
            "function": FUNCTION,
            "name": "x",
            "document": "{}",
            "state": "STOPPED",
            "reason": "",
        }
        write.sql.execute(
            sa.insert(tables.experiments).values(
                **experiment, created_by="k-1", created_at=write.now
            )
        )
        schedule = {
            "function": FUNCTION,
            "number": 0,
            "tenant": "t-1",
            "document": "{}",
            "is_paused": False,
            "updated_at": write.now,
        }
        write.sql.execute(sa.insert(tables.schedules).values(**schedule))
        hook = {
            "tenant": "t-1",
            "environment": "staging",
            "name": "ops",
            "url": "https://ops.invalid/",
            "sealed_secret": "",
            "events": "[]",
        }
        write.sql.execute(
            sa.insert(tables.webhooks).values(**hook, created_by="k-1", created_at=write.now)
        )
        app_registry.delete(write, PLACE)
        tenants.delete_environment(write, tenant="t-1", name="staging", actor="k-1")
    with filled.read() as sql:
        assert tenants.environments(sql, tenant="t-1") == []
        assert (
            sql.execute(sa.select(sa.func.count()).select_from(tables.functions)).scalar_one() == 0
        )
