"""The control plane's store: the same promises on SQLite and on PostgreSQL."""

from __future__ import annotations

import functools
import json
import re
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError

from pilotlight.controller.analytics import environment_usage as use
from pilotlight.controller.analytics import (
    function_stats,
    latency_histograms,
    recent_calls,
    tenant_shares,
    usage_reports,
)
from pilotlight.controller.analytics.time_range import TimeRange
from pilotlight.controller.billing import ledger
from pilotlight.controller.database import audit_trail, bulk, feed, tables
from pilotlight.controller.database import store as store_module
from pilotlight.controller.database.store import Store, newest_schema_revision
from pilotlight.controller.deployments import app_registry
from pilotlight.controller.identity import api_keys, tenants
from pilotlight.controller.registry import launch_spec
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.release import app_history
from pilotlight.controller.scheduling import submitted_calls
from pilotlight.controller.server import bootstrap, database_lock
from pilotlight.errors import Conflict, InvalidInput, NotFound, Unavailable
from pilotlight.protocol import CallRecord, FunctionRoute
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.identifiers import Scope
from pilotlight.spec.record_json import from_json
from snapshotter.types import LaunchSpec
from tests.functions.controller.parts import ManualClock, at_once, spec, usage


@pytest.fixture
def place(store: Store) -> AppRef:
    with store.write() as write:
        tenant = tenants.create(write, name="default", uid_base=20_000, actor="platform")
    return AppRef(tenant=tenant.id, uid=tenant.uid, environment="main", app="search", actor="k-1")


def deploy(store: Store, place: AppRef, *specs: dict[str, object]) -> app_registry.Deployment:
    with store.write() as write:
        return app_registry.deploy(write, place, specs=[from_json(FunctionSpec, s) for s in specs])


def page(store: Store, after: int = 0, limit: int = 1000) -> feed.Page:
    with store.read() as sql:
        return feed.read(sql, after=after, limit=limit)


def changes(found: feed.Page) -> list[dict[str, object]]:
    return [json.loads(text) for text in found.changes]


def test_migrating_again_changes_nothing_and_the_layout_is_what_tables_says(store: Store) -> None:
    store.migrate()
    with store.read() as sql:
        context = MigrationContext.configure(sql, opts={"compare_type": True})
        assert compare_metadata(context, tables.metadata) == []


def test_files_of_migrations_begin_with_their_revision_and_the_newest_is_the_head(
    store: Store,
) -> None:
    scripts = ScriptDirectory(str(Path(store_module.__file__).parent / "migrations"))
    assert {Path(script.path).name.partition("_")[0] for script in scripts.walk_revisions()} == {
        s.revision for s in scripts.walk_revisions()
    }
    assert newest_schema_revision() == scripts.get_current_head()


def test_a_schema_of_a_later_release_is_not_taken_for_ours(store: Store) -> None:
    with store.write() as write:
        write.sql.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(CommandError, match="9999"):
        store.migrate()


def test_two_starters_may_migrate_at_once(url: str, clock: ManualClock) -> None:
    stores = [Store(url, clock=clock) for _ in range(2)]
    at_once(Store.migrate, stores)
    for store in stores:
        assert page(store).seq == 1
        store.close()


def test_of_two_bootstraps_one_makes_the_key(store: Store, clock: ManualClock) -> None:
    other = Store(store.engine.url.render_as_string(hide_password=False), clock=clock)
    made = at_once(functools.partial(bootstrap.ensure_admin, uid_base=None), (store, other))
    other.close()
    assert sorted(m is None for m in made) == [False, True]


def test_tenants_of_a_platform_that_gets_root_get_uids_of_their_own(store: Store) -> None:
    with store.write() as write:
        tenants.create(write, name="first", uid_base=None, actor="platform")
        tenants.create(write, name="second", uid_base=None, actor="platform")
    bootstrap.ensure_admin(store, uid_base=20_000)

    with store.read() as sql:
        assert sorted(row["uid"] for row in tenants.all_tenants(sql)) == [20_000, 20_001, 20_002]


def test_a_failed_write_leaves_nothing_behind(store: Store) -> None:
    def fail_on_the_way() -> None:
        with store.write() as write:
            tenants.create(write, name="acme", uid_base=None, actor="platform")
            raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        fail_on_the_way()
    assert page(store).changes == ()
    with store.read() as sql:
        assert sql.execute(sa.select(tables.tenants)).all() == []


def test_a_connection_in_use_when_the_store_closes_is_closed_when_it_comes_back(
    store: Store,
) -> None:
    opened: list[object] = []
    closed: list[object] = []
    event.listen(store.engine, "connect", lambda raw, _record: opened.append(raw))
    event.listen(store.engine, "close", lambda raw, _record: closed.append(raw))
    reading, may_end = threading.Event(), threading.Event()

    def slow_read() -> None:
        with store.read() as sql:
            reading.set()
            may_end.wait()
            assert sql.execute(sa.select(1)).scalar_one() == 1, "it may finish"

    thread = threading.Thread(target=slow_read)
    thread.start()
    reading.wait()
    with store.read():  # a second connection, which is idle when the store closes
        pass
    store.close()
    may_end.set()
    thread.join()
    assert len(opened) == 2
    assert {id(raw) for raw in closed} == {id(raw) for raw in opened}


def test_a_closed_store_opens_no_connection(store: Store) -> None:
    store.ping()
    store.close()
    opened: list[object] = []
    event.listen(store.engine, "connect", lambda raw, _record: opened.append(raw))

    def late_write() -> None:
        with store.write():
            pass

    def late_read() -> None:
        with store.read():
            pass

    for late in (late_write, late_read, store.ping, store.migrate):
        with pytest.raises(Unavailable, match="shutting down"):
            late()
    assert opened == []


def test_an_equal_spec_is_the_same_revision_and_makes_no_noise(store: Store, place: AppRef) -> None:
    first = deploy(store, place, spec())
    seq = page(store).seq
    second = deploy(store, place, spec())
    assert [(d.revision[:3], d.created) for d in first.functions] == [("v1-", True)]
    assert [(d.revision, d.created) for d in second.functions] == [
        (first.functions[0].revision, False)
    ]
    assert (first.version, second.version) == (1, 2)
    assert page(store, after=seq).changes == ()


def test_revisions_are_numbered_and_going_back_is_not_a_new_one(
    store: Store, place: AppRef
) -> None:
    names = [deploy(store, place, spec(env={"N": n})).functions[0] for n in ("1", "2", "1")]
    assert [n.revision[:3] for n in names] == ["v1-", "v2-", "v1-"]
    assert [n.created for n in names] == [True, True, False]


def test_a_route_carries_all_that_the_data_plane_needs(store: Store, place: AppRef) -> None:
    done = deploy(
        store, place, spec(weights=[{"name": "minilm", "manifest": "cd" * 32}], snapshot=False)
    )
    change = next(c for c in changes(page(store)) if c["kind"] == "function")
    assert change["key"] == f"{place.tenant}/main/search/hello"
    route = FunctionRoute.from_json(change["value"])  # type: ignore[arg-type]
    revision = done.functions[0].revision
    launch = LaunchSpec.from_json(route.revisions[revision]["launch"])
    assert route.traffic == ((revision, 100),)
    assert launch.revision == f"{route.id}@{revision}"
    assert (launch.trust_domain, launch.uid, launch.forkable) == (place.tenant, 20_000, False)
    assert launch.weights[0].name == "minilm"
    assert launch.labels["function"] == "hello"
    assert from_json(FunctionSpec, launch.entry).name == "hello"


def test_functions_that_a_deploy_leaves_out_are_removed_and_their_numbers_go_on(
    store: Store, place: AppRef
) -> None:
    deploy(store, place, spec("one"), spec("two"))
    seq = page(store).seq
    deploy(store, place, spec("one"))
    assert [(c["key"], c["value"]) for c in changes(page(store, after=seq))] == [
        (f"{place.tenant}/main/search/two", None)
    ]
    back = deploy(store, place, spec("one"), spec("two", env={"A": "b"}))
    assert back.functions[1].revision.startswith("v2-")


def test_stop_marks_every_route_and_deploy_starts_again(store: Store, place: AppRef) -> None:
    deploy(store, place, spec())
    with store.write() as write:
        app_registry.stop(write, place)
    stopped = [c["value"]["stopped"] for c in changes(page(store)) if c["kind"] == "function"]  # type: ignore[index]
    deploy(store, place, spec())
    again = [c["value"]["stopped"] for c in changes(page(store)) if c["kind"] == "function"]  # type: ignore[index]
    assert (stopped, again) == ([True], [False])


def test_a_deleted_app_is_gone_but_its_history_stays(store: Store, place: AppRef) -> None:
    deploy(store, place, spec())
    with store.write() as write:
        app_registry.delete(write, place)
    where: dict[str, Any] = {"tenant": place.tenant, "environment": "main"}
    with store.read() as sql:
        assert app_registry.apps(sql, **where) == []
        with pytest.raises(NotFound, match="no app 'search'"):
            app_registry.app(sql, **where, name="search")
        assert [h["action"] for h in app_history.entries(sql, **where, app="search", limit=9)] == [
            "delete",
            "deploy",
        ]


def test_the_feed_keeps_only_the_newest_change_of_a_thing(store: Store, place: AppRef) -> None:
    for n in range(5):
        deploy(store, place, spec(env={"N": str(n)}))
    assert len([c for c in changes(page(store)) if c["kind"] == "function"]) == 1


def test_pages_add_up_to_everything_in_order(store: Store, place: AppRef) -> None:
    deploy(store, place, *(spec(f"f{n}") for n in range(25)))
    found = page(store, limit=10)
    assert (found.reset, found.more) == (True, True)
    seen = changes(found)
    while found.more:
        found = page(store, after=found.seq, limit=10)
        assert not found.reset
        seen += changes(found)
    assert [c["seq"] for c in seen] == sorted(c["seq"] for c in seen)  # type: ignore[type-var]
    assert len({c["key"] for c in seen}) == 25 + 1
    assert page(store, after=found.seq).changes == ()


def test_a_position_from_another_life_starts_over(store: Store, place: AppRef) -> None:
    assert page(store, after=10**6).reset
    assert not page(store, after=page(store).seq).reset


def test_a_purge_resets_who_may_have_missed_a_removal_and_nobody_else(
    store: Store, place: AppRef, clock: ManualClock
) -> None:
    deploy(store, place, spec("one"), spec("two"))
    stale = page(store).seq
    deploy(store, place, spec("one"))
    fresh = page(store).seq
    clock.now += feed.TOMBSTONE_TTL_S + 1
    with store.write() as write:
        assert feed.purge(write, before=clock.now - feed.TOMBSTONE_TTL_S) == 1
    assert page(store, after=stale).reset
    assert not page(store, after=fresh).reset
    paging = page(store, limit=1)
    assert not page(store, after=paging.seq, limit=1).reset, (
        "a follower that pages through a fresh start must not begin again"
    )


def test_a_revoked_key_leaves_the_feed_at_once(store: Store, place: AppRef) -> None:
    with store.write() as write:
        made = api_keys.create(write, tenant=place.tenant, scope=Scope.INVOKE, actor="k-1")
    seq = page(store).seq
    with store.write() as write:
        api_keys.revoke(write, tenant=place.tenant, key_id=made.record.id, actor="k-1")
    assert [(c["kind"], c["key"], c["value"]) for c in changes(page(store, after=seq))] == [
        ("key", made.record.id, None)
    ]


def outcome(added: ledger.LedgerInsert) -> tuple[int, list[str]]:
    return added.new, list(added.conflicts)


def test_usage_is_counted_once_however_often_it_is_sent(store: Store) -> None:
    for _ in range(3):
        with store.write() as write:
            ledger.add(write, [usage("req-1/1"), usage("req-2/1")])
    with store.read() as sql:
        (line,) = usage_reports.report(
            sql, tenant="t-1", by="function", since=None, until=None, environment=None
        )
    assert line.records == 2
    assert line.cost == 2 * Decimal("0.000000045960")


def test_the_first_content_of_a_record_stands_and_another_is_reported(store: Store) -> None:
    with store.write() as write:
        assert outcome(ledger.add(write, [usage(cost="0.5")])) == (1, [])
        assert outcome(ledger.add(write, [usage(cost="0.7")])) == (0, ["req-1/1"])
    with store.read() as sql:
        assert [u.cost for u in ledger.attempts(sql, tenant="t-1", call="req-1")] == ["0.5"]


def test_sums_are_exact_beyond_64_bits_of_picounits(store: Store) -> None:
    large = "4000000.000000000001"  # four of them are above 2**63 picounits
    with store.write() as write:
        ledger.add(write, [usage(f"req-{n}/1", cost=large) for n in range(4)])
    with store.read() as sql:
        (line,) = usage_reports.report(
            sql, tenant="t-1", by="app", since=None, until=None, environment=None
        )
    assert line.cost == Decimal("16000000.000000000004")


@pytest.mark.parametrize("cost", ["1e-13", "-1", "NaN", "Infinity", "plenty", "5000000"])
def test_a_cost_that_cannot_be_kept_exactly_is_refused(store: Store, cost: str) -> None:
    with pytest.raises(InvalidInput, match="cost"), store.write() as write:
        ledger.add(write, [usage(cost=cost)])


def test_a_batch_with_new_known_repeated_and_changed_records_keeps_each_once(store: Store) -> None:
    with store.write() as write:
        ledger.add(write, [usage("req-1/1", cost="1"), usage("req-2/1", cost="1")])
    again = [
        usage("req-1/1", cost="1"),
        usage("req-2/1", cost="2"),
        usage("req-3/1", cost="1"),
        usage("req-3/1", cost="1"),
    ]
    with store.write() as write:
        assert outcome(ledger.add(write, again)) == (1, ["req-2/1"])
    with store.read() as sql:
        (line,) = usage_reports.report(
            sql, tenant="t-1", by="app", since=None, until=None, environment=None
        )
    assert (line.records, line.cost) == (3, Decimal(3))


@pytest.mark.parametrize(
    "cost",
    ["0", "7", "0.5", "1e-12", "0.000000000001", "999999.999999999999", "1000000.000000000000"],
)
def test_a_cost_is_kept_exactly_however_it_is_written(store: Store, cost: str) -> None:
    with store.write() as write:
        ledger.add(write, [usage(cost=cost)])
    with store.read() as sql:
        (line,) = usage_reports.report(
            sql, tenant="t-1", by="app", since=None, until=None, environment=None
        )
        assert [record.cost for record in ledger.attempts(sql, tenant="t-1", call="req-1")] == [
            cost
        ]
    assert line.cost == Decimal(cost)


WRONG_RECORDS = [
    {"status": "200"},
    {"status": True},
    {"status": 2**63},
    {"queued_ms": 1.5},
    {"started_at": float("inf")},
    {"started_at": float("nan")},
    {"app": "\ud800"},
    {"tenant": None},
    {"colour": "red"},
]


@pytest.mark.parametrize("wrong", WRONG_RECORDS, ids=repr)
def test_a_record_that_is_none_is_refused_with_its_whole_batch(
    store: Store, wrong: dict[str, object]
) -> None:
    with pytest.raises(InvalidInput), store.write() as write:
        ledger.add_rows(
            write, [usage("req-1/1").to_json(), {**usage("req-2/1").to_json(), **wrong}]
        )
    with store.read() as sql:
        assert ledger.attempts(sql, tenant="t-1", call="req-1") == []


def test_a_record_may_leave_out_what_has_a_default(store: Store) -> None:
    row = {
        key: value
        for key, value in usage("req-1/1").to_json().items()
        if key not in {"tokens_in", "bytes_out", "currency"}
    }
    with store.write() as write:
        assert outcome(ledger.add_rows(write, [row])) == (1, [])
        assert outcome(ledger.add_rows(write, [row])) == (0, [])
        with pytest.raises(InvalidInput, match=r"records\[0\].call is missing"):
            ledger.add_rows(write, [{key: value for key, value in row.items() if key != "call"}])
    with store.read() as sql:
        assert ledger.attempts(sql, tenant="t-1", call="req-1") == [usage("req-1/1")]


def test_a_bill_is_cut_by_time_and_environment_and_grouped(store: Store) -> None:
    day = 86_400.0
    with store.write() as write:
        ledger.add(
            write,
            [
                usage(f"req-{n}/1", started_at=20_000 * day + n * day, cost="1", key=f"k-{n % 2}")
                for n in range(4)
            ],
        )
        ledger.add(
            write,
            [
                usage("req-9/1", environment="staging", cost="7"),
                usage("req-8/1", tenant="t-2", cost="9"),
            ],
        )
    with store.read() as sql:
        days = usage_reports.report(
            sql, tenant="t-1", by="day", since=20_001 * day, until=20_003 * day, environment="main"
        )
        by_key = usage_reports.report(
            sql, tenant="t-1", by="key", since=None, until=None, environment="main"
        )
        whole = usage_reports.report(
            sql, tenant="t-1", by="environment", since=None, until=None, environment=None
        )
    assert [(line.group["day"], line.cost) for line in days] == [
        ("2024-10-05", Decimal(1)),
        ("2024-10-06", Decimal(1)),
    ]
    assert [(line.group["key"], line.cost) for line in by_key] == [
        ("k-0", Decimal(2)),
        ("k-1", Decimal(2)),
    ]
    assert [(line.group["environment"], line.cost) for line in whole] == [
        ("main", Decimal(4)),
        ("staging", Decimal(7)),
    ]


def test_the_figures_of_a_day_are_the_same_everywhere(
    store: Store, place: AppRef, clock: ManualClock
) -> None:
    deploy(store, place, spec("embed"), spec("idle"))
    function = launch_spec.function_id(
        tenant=place.tenant, environment="main", app="search", function="embed"
    )
    common = {
        "tenant": place.tenant,
        "function_id": function,
        "queued_ms": 0,
        "start_ms": 0,
        "cost": "0.5",
    }
    with store.write() as write:
        kinds = ["COLD", "FORK"] + ["WARM"] * 98
        records = [
            usage(f"req-{n}/1", **common, exec_ms=n + 1, started_at=clock.now - 10, start_kind=k)
            for n, k in enumerate(kinds)
        ]
        ledger.add(
            write,
            [*records, usage("i-1/IDLE/1", **common, kind="IDLE", started_at=clock.now - 7200)],
        )
    where: dict[str, Any] = {"tenant": place.tenant, "environment": "main"}
    with store.read() as sql:
        used = use.read(sql, **where, span=TimeRange.of("24h", clock.now), currency="USD")
        parts = latency_histograms.read(sql, now=clock.now, **where)
        busy, idle = function_stats.table(sql, **where, usage=used, parts=parts)
        mine = recent_calls.read(sql, now=clock.now, limit=2, **where)
        (share,) = tenant_shares.read(sql, span=used.span, plans={}, currency="USD")
    assert (busy.name, busy.calls.records, busy.starts, busy.whole.cost) == (
        "embed",
        100,
        {"WARM": 98, "FORK": 1, "COLD": 1},
        Decimal("50.5"),
    )
    for percent in (50, 99):
        assert busy.latency.percentile(percent) == pytest.approx(percent, rel=0.05)
    assert (
        idle.name,
        idle.calls.records,
        idle.latency.percentile(50),
        sum(busy.units),
        busy.units[-2],
    ) == ("idle", 0, None, 100, 100)
    assert ([c.started_at for c in mine.calls], bool(mine.older)) == ([clock.now - 10] * 2, True)
    assert (share.whole.cost, share.calls.records) == (Decimal("50.5"), 100)


def call(sequence: int, **changes: object) -> CallRecord:
    values: dict[str, object] = {
        "id": "req-1",
        "tenant": "t-1",
        "environment": "main",
        "app": "search",
        "function": "embed",
        "method": "",
    }
    state: dict[str, object] = {
        "state": "RUNNING",
        "sequence": sequence,
        "submitted_at": 1.0,
        "expires_at": 100.0,
    }
    return CallRecord(**{**values, **state, **changes})  # type: ignore[arg-type]


def test_the_newest_sequence_of_a_call_wins_in_any_order(store: Store) -> None:
    with store.write() as write:
        submitted_calls.put(write, [call(1), call(3, state="SUCCEEDED"), call(2)])
    with store.read() as sql:
        assert submitted_calls.get(sql, tenant="t-1", call="req-1")["state"] == "SUCCEEDED"
        with pytest.raises(NotFound):
            submitted_calls.get(sql, tenant="t-2", call="req-1")


def test_two_tenants_may_choose_the_same_call_id(store: Store) -> None:
    with store.write() as write:
        submitted_calls.put(write, [call(1), call(9, tenant="t-2", state="FAILED")])
    with store.read() as sql:
        assert submitted_calls.get(sql, tenant="t-1", call="req-1")["state"] == "RUNNING"


def test_expired_calls_go_in_batches(store: Store) -> None:
    with store.write() as write:
        submitted_calls.put(write, [call(1, id=f"req-{n}", expires_at=float(n)) for n in range(10)])
        assert [submitted_calls.expire(write, now=8.0, limit=5) for _ in range(3)] == [5, 3, 0]


def test_a_synchronous_call_is_told_from_its_usage(store: Store) -> None:
    with store.write() as write:
        ledger.add(
            write,
            [
                usage("req-7/1", outcome="lost", cost="0.5"),
                usage("req-7/2", attempt=2, cost="0.25"),
            ],
        )
    with store.read() as sql:
        found = submitted_calls.get(sql, tenant="t-1", call="req-7")
    assert (found["state"], found["cost"], len(found["attempts"])) == ("SUCCEEDED", "0.75", 2)


def test_the_audit_log_cannot_be_changed(store: Store, place: AppRef) -> None:
    for statement in (sa.update(tables.audit).values(actor="nobody"), sa.delete(tables.audit)):
        with pytest.raises(DBAPIError, match="append-only"), store.write() as write:
            write.sql.execute(statement)
    with store.read() as sql:
        assert [
            e["action"]
            for e in audit_trail.entries(sql, audit_trail.AuditQuery(tenant=place.tenant), limit=9)
        ] == [
            "environment.create",
            "tenant.create",
        ]


def test_every_tenant_has_a_uid_of_its_own(store: Store) -> None:
    with store.write() as write:
        assert [
            tenants.create(write, name=n, uid_base=20_000, actor="platform").uid for n in ("a", "b")
        ] == [20_000, 20_001]
        with pytest.raises(Conflict, match="'a' already exists"):
            tenants.create(write, name="a", uid_base=20_000, actor="platform")


def test_an_environment_goes_only_when_it_is_empty_and_takes_its_keys_along(
    store: Store, place: AppRef
) -> None:
    staging = AppRef(
        tenant=place.tenant, uid=None, environment="staging", app="search", actor="k-1"
    )
    with store.write() as write:
        tenants.create_environment(write, tenant=place.tenant, name="staging", actor="k-1")
        made = api_keys.create(
            write, tenant=place.tenant, scope=Scope.INVOKE, actor="k-1", environment="staging"
        )
    deploy(store, staging, spec())
    with pytest.raises(Conflict, match="still has apps"), store.write() as write:
        tenants.delete_environment(write, tenant=place.tenant, name="staging", actor="k-1")
    with store.write() as write:
        app_registry.delete(write, staging)
        tenants.delete_environment(write, tenant=place.tenant, name="staging", actor="k-1")
    assert {c["key"]: c["value"] for c in changes(page(store))}[made.record.id] is None


def test_a_second_controller_on_one_database_is_refused_by_name(
    store: Store, tmp_path: Path
) -> None:
    with database_lock.ControllerLock(tmp_path / "controller.lock", store.engine):
        elsewhere = tmp_path / (
            "controller.lock" if store.engine.dialect.name == "sqlite" else "other.lock"
        )
        with (
            pytest.raises(database_lock.AlreadyRunning, match="another controller"),
            database_lock.ControllerLock(elsewhere, store.engine),
        ):
            pass
    for _ in range(20):  # the database may still be ending the session before
        with database_lock.ControllerLock(tmp_path / "controller.lock", store.engine):
            pass


def test_rows_with_one_of_several_keys_are_found_by_the_index(store: Store) -> None:
    table = tables.revisions
    keys = [("f-1", "v1"), ("f-1", "v2"), ("f-2", "v1")]
    with store.read() as sql:
        those = bulk.is_one_of(sql, (table.c.function, table.c.name), keys)
        query = sa.select(table).where(those)
        assert sql.execute(query).all() == []
        text = str(query.compile(sql, compile_kwargs={"literal_binds": True}))
        if sql.dialect.name == "postgresql":
            sql.exec_driver_sql("SET LOCAL enable_seqscan = off")  # the table is empty
            text = f"EXPLAIN {text}"
        else:
            text = f"EXPLAIN QUERY PLAN {text}"
        plan = "\n".join(str(tuple(row)) for row in sql.exec_driver_sql(text))
    assert re.search(r"SEARCH revisions USING INDEX|Index Scan", plan), plan
