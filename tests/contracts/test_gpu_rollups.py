"""Rollups by the kind of GPU that was granted, and what an upgrade makes of earlier ones."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from pilotlight.controller.analytics import usage_reports
from pilotlight.controller.billing import ledger, rollups
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store
from pilotlight.protocol import UsageRecord
from tests.fakes.databases import without_customers
from tests.functions.controller.parts import ManualClock, usage

SECOND = 10**9


def record(
    id: str, kind: str, gpu: str | None, *, seconds: int = 10, revision: str = "v1"
) -> UsageRecord:
    return usage(
        id,
        tenant="t-1",
        environment="main",
        app="a",
        function="f",
        function_id="f-1",
        revision=revision,
        kind=kind,
        gpu=gpu,
        gpu_count=2 if gpu else 0,
        billed_ns=seconds * SECOND,
        started_at=1_764_000_000.0,
        cost="0.5",
    )


RECORDS = (
    record("1", "CALL", "H100"),
    record("2", "START", "H100"),
    record("3", "CPU", None),
    record("4", "CALL", "L4", revision="v2"),
    record("5", "CALL", None, revision="v3"),
)


def kinds_of(store: Store, table: sa.Table) -> set[tuple[str, str, str, float]]:
    c = table.c
    with store.read() as sql:
        rows = sql.execute(sa.select(c.revision, c.kind, c.gpu, c.gpu_s)).all()
    return {(row[0], row[1], row[2], row[3]) for row in rows}


def test_an_upgrade_names_the_kinds_of_earlier_sums(url: str, clock: ManualClock) -> None:
    store = Store(url, clock=clock)
    store.migrate()
    with store.write() as write:
        ledger.add(write, RECORDS)
        after = {
            table: list(map(tuple, write.sql.execute(sa.select(table))))
            for table in (tables.usage_hours, tables.usage_days)
        }
        _as_before(write.sql, after)
    store.migrate()
    for table in (tables.usage_hours, tables.usage_days):
        assert kinds_of(store, table) == {
            ("v1", "CALL", "H100", 20.0),
            ("v1", "START", "H100", 20.0),
            ("v1", "CPU", "", 0.0),
            ("v2", "CALL", "L4", 20.0),
            ("v3", "CALL", "", 0.0),
        }
        with store.read() as sql:
            assert sorted(map(tuple, sql.execute(sa.select(table)))) == sorted(after[table])
    with store.write() as write:
        assert rollups.verify(write.sql) == []
        ledger.add(write, [record("6", "CALL", "A100")])
    assert ("v1", "CALL", "A100", 20.0) in kinds_of(store, tables.usage_days)
    store.close()


def _as_before(sql: sa.Connection, after: dict[sa.Table, list[tuple[object, ...]]]) -> None:
    """The rollups as version 0017 had them: without a kind, in which all GPUs are one group."""
    for table, rows in after.items():
        names = [column.name for column in table.columns if column.name != "gpu"]
        keys = [column.name for column in table.primary_key if column.name != "gpu"]
        values = [
            tuple(v for column, v in zip(table.columns, row, strict=True) if column.name != "gpu")
            for row in rows
        ]
        table.drop(sql)
        sa.Table(
            table.name,
            sa.MetaData(),
            *(sa.Column(n, table.c[n].type, nullable=False) for n in names),
            sa.PrimaryKeyConstraint(*keys),
            *([sa.Index("ix_usage_days_tenant_month", "tenant", "month")] * ("day" in names)),
        ).create(sql)
        places = ", ".join(f":{name}" for name in names)
        quoted = ", ".join(f'"{name}"' for name in names)
        sql.execute(
            sa.text(f"INSERT INTO {table.name} ({quoted}) VALUES ({places})"),
            [dict(zip(names, value, strict=True)) for value in values],
        )
    # of versions 0019 to 0028
    without_customers(sql)
    sql.execute(sa.text("DROP INDEX ix_due_calls_cancel"))
    sql.execute(sa.text("ALTER TABLE due_calls DROP COLUMN cancel_at"))
    for name in ("stored_bytes", "collection_bytes"):
        sql.execute(sa.text(f"ALTER TABLE tenants DROP COLUMN {name}"))
    drift = ("drift_sketches", "drift_scores", "drift_references", "drift_reports")
    later = (
        *drift,
        *("batch_files", "batches", "batch_lines"),
        "prediction_files",
        "node_snapshots",
        "volume_entries",
        "volume_chunks",
        "volumes",
    )
    for name in (*later, "collection_operations", "collection_values", "collections"):
        sql.execute(sa.text(f"DROP TABLE {name}"))
    sql.execute(sa.text("DROP INDEX ix_feedback_at"))
    sql.execute(sa.text("UPDATE alembic_version SET version_num = '0017'"))


def test_a_report_has_a_line_for_each_granted_kind_and_state(store: Store) -> None:
    with store.write() as write:
        ledger.add(
            write,
            [
                *RECORDS,
                record("7", "CALL", "A100"),
                record("8", "FREE_IDLE", "A100"),
                record("9", "ASLEEP", "A100"),
            ],
        )
    with store.read() as sql:
        lines = {
            by: usage_reports.report(
                sql, tenant="t-1", by=by, since=None, until=until, environment=None
            )
            for by, until in (("gpu", None), ("function", 1_764_000_001.0))
        }
    for found in lines.values():
        seconds: dict[tuple[str, str], float] = {}
        for line in found:
            key = (line.gpu, line.gpu_state)
            seconds[key] = seconds.get(key, 0.0) + line.gpu_s
        assert seconds == {
            ("", ""): 0.0,
            ("A100", "busy"): 20.0,
            ("A100", "idle_free"): 20.0,
            ("A100", "asleep"): 20.0,
            ("H100", "busy"): 20.0,
            ("H100", "start"): 20.0,
            ("L4", "busy"): 20.0,
        }
    assert {line.group["gpu"] for line in lines["gpu"]} == {"", "A100", "H100", "L4"}


@pytest.mark.parametrize("gpu", ["H100", None])
def test_a_rebuild_makes_the_same_kinds(store: Store, gpu: str | None) -> None:
    with store.write() as write:
        ledger.add(write, [record("1", "CALL", gpu), record("2", "CALL", "L4")])
    before = kinds_of(store, tables.usage_hours)
    with store.write() as write:
        rollups.rebuild(write)
    assert kinds_of(store, tables.usage_hours) == before
    assert {row[2] for row in before} == {gpu or "", "L4"}
