"""A database from before what tenants keep had bounds: what is in it counts afterwards, and nothing
of it is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store
from pilotlight.controller.scheduling import submitted_calls
from pilotlight.controller.server import idempotency
from pilotlight.spec.function import FunctionSpec, canonical_json, from_json, to_json
from tests.fakes.databases import migrate_to
from tests.functions.controller.parts import ManualClock, spec

AT = 1_799_000_000.0
LARGE = "QUJD" * 25_000
CALL = {
    "environment": "main",
    "app": "a",
    "function": "f",
    "state": "SUCCEEDED",
    "sequence": 1,
    "submitted_at": AT,
    "expires_at": AT + 10,
}


def spec_text(**changes: Any) -> str:
    return canonical_json(to_json(from_json(FunctionSpec, spec(**changes)))).decode()


def rows() -> Iterator[tuple[str, dict[str, Any]]]:
    """As 0010 left them."""
    yield "tenants", {"id": "t-1", "name": "default", "created_at": AT}
    yield "environments", {"tenant": "t-1", "name": "main", "created_at": AT}
    app = {
        "tenant": "t-1",
        "environment": "main",
        "name": "a",
        "version": 2,
        "stopped": False,
        "created_at": AT,
        "updated_at": AT,
    }
    yield "apps", app
    function = {
        "id": "f-1",
        "tenant": "t-1",
        "environment": "main",
        "app": "a",
        "name": "f",
        "revisions": 3,
        "created_at": AT,
    }
    yield "functions", function
    misleading = '{"properties":{"a":{},"tags":{},"z":{}}}'
    told: list[dict[str, Any]] = [
        {},
        {"tags": {"team": "search"}},
        {"tags": {"team": "x"}, "description": misleading},
    ]
    for number, changes in enumerate(told):
        revision = {
            "function": "f-1",
            "name": f"v{number}",
            "digest": str(number),
            "ordinal": number,
            "created_at": AT,
        }
        yield "revisions", {**revision, "spec": spec_text(**changes)}
    for name, claimed_by, until in (
        ("waits", None, None),
        ("claimed", "a-0", AT + 60),
        ("taken", "a-0", None),
    ):
        document = f'{{"id":"{name}"}}'
        due_call = {
            "id": name,
            "tenant": "t-1",
            "document": document,
            "due_at": AT,
            "claimed_by": claimed_by,
            "claimed_until": until,
        }
        yield "due_calls", due_call
    for tenant, name, payload in (
        ("t-1", "c-1", None),
        ("t-1", "c-2", '{"body":"é"}'),
        ("t-2", "c-1", None),
    ):
        yield (
            "calls",
            {
                **CALL,
                "tenant": tenant,
                "id": name,
                "record": '{"result":"ABC"}',
                "payload": payload,
            },
        )
    yield "calls", {**CALL, "tenant": "t-4", "id": "c-1", "record": f'{{"result":"{LARGE}"}}'}
    answer = {
        "request_hash": "h",
        "content_type": "",
        "answer": "x" * 500,
        "status": 201,
        "created_at": AT,
        "expires_at": AT + 86_400,
    }
    yield "idempotency_keys", {"tenant": "t-1", "key": "k-1/order", **answer}


@pytest.fixture
def upgraded(url: str) -> Iterator[Store]:
    """A store as 0010 left it, with rows, brought up to date."""
    store = Store(url, clock=ManualClock(AT + 1))
    migrate_to(store, "0010")
    with store.write() as write:
        for table, values in rows():
            write.sql.execute(
                sa.insert(sa.table(table, *(sa.column(name) for name in values))).values(**values)
            )
    store.migrate()
    yield store
    store.close()


def test_kept_calls_are_counted_by_tenant_and_go_with_their_count(upgraded: Store) -> None:
    sizes = {
        ("t-1", "c-1"): 16,
        ("t-1", "c-2"): 28,
        ("t-2", "c-1"): 16,
        ("t-4", "c-1"): 13 + len(LARGE),
    }
    with upgraded.write() as write:
        found = {
            (row.tenant, row.id): row.kept_bytes
            for row in write.sql.execute(sa.select(tables.calls))
        }
        assert found == sizes
        assert [
            submitted_calls.kept_bytes(write.sql, tenant=tenant) for tenant in ("t-1", "t-2", "t-3")
        ] == [
            44,
            16,
            0,
        ]
        assert submitted_calls.expire(write, now=AT + 100, limit=10) == 4
        assert [
            submitted_calls.kept_bytes(write.sql, tenant=tenant) for tenant in ("t-1", "t-2")
        ] == [0, 0]


def test_results_are_moved_out_of_the_records_that_lists_read(upgraded: Store) -> None:
    with upgraded.read() as sql:
        found = {
            (row.tenant, row.id): (row.record, row.result)
            for row in sql.execute(sa.select(tables.calls))
        }
        small = dict.fromkeys(
            (("t-1", "c-1"), ("t-1", "c-2"), ("t-2", "c-1")), ('{"result":""}', "ABC")
        )
        assert found == {**small, ("t-4", "c-1"): ('{"result":""}', LARGE)}
        listed = submitted_calls.listing(sql, submitted_calls.CallQuery(tenant="t-2"), limit=10)
        assert listed == [{}], "without a result"
        assert submitted_calls.get(sql, tenant="t-2", call="c-1")["result"] == "ABC"


def test_due_calls_that_wait_are_whole_and_those_that_were_taken_are_a_note(
    upgraded: Store,
) -> None:
    with upgraded.write() as write:
        found = {row.id: row.document for row in write.sql.execute(sa.select(tables.due_calls))}
        assert found == {"waits": '{"id":"waits"}', "claimed": '{"id":"claimed"}', "taken": "{}"}


def test_answers_are_counted_and_revisions_know_whether_they_have_tags(upgraded: Store) -> None:
    with upgraded.read() as sql:
        assert (
            sql.execute(sa.select(tables.idempotency_keys.c.kept_bytes)).scalar_one()
            == idempotency.ROW_BYTES + 500
        )
        found = {
            row.name: row.has_tags
            for row in sql.execute(sa.select(tables.revisions.c.name, tables.revisions.c.has_tags))
        }
        assert found == {"v0": False, "v1": True, "v2": True}


def test_tables_are_what_the_code_says(upgraded: Store) -> None:
    """Indexes too: one that is only in a migration, or only in the code, is missing for
    somebody."""
    inspector = sa.inspect(upgraded.engine)
    for name in ("due_calls", "calls", "kept_calls", "idempotency_keys", "revisions"):
        table = tables.metadata.tables[name]
        assert {column["name"] for column in inspector.get_columns(name)} == set(
            table.columns.keys()
        )
        indexes = {
            str(index["name"]): index["column_names"] for index in inspector.get_indexes(name)
        }
        there = {index: columns for index, columns in indexes.items() if index.startswith("ix_")}
        assert there == {
            str(index.name): [column.name for column in index.columns] for index in table.indexes
        }
