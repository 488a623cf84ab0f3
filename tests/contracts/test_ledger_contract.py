"""Money: what the ledger promises on SQLite and on PostgreSQL alike."""

from __future__ import annotations

import random
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pilotlight.controller.analytics import usage_reports
from pilotlight.controller.billing import (
    corrections,
    invoices,
    ledger,
    ledger_totals,
    price_lists,
    rollups,
    usage_exports,
)
from pilotlight.controller.billing.usage_aggregation import CLOCKS, SpendKey, bucket_of
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store
from pilotlight.controller.identity import tenants
from pilotlight.core.settings import SettingsInvalid
from pilotlight.errors import Conflict, InvalidInput, NotFound
from pilotlight.protocol import UsageRecord
from pilotlight.spec.pricing import PriceSettings
from tests.functions.controller.parts import ManualClock, usage
from tests.hypothesis_profiles import examples

DAY = 86_400.0
NOVEMBER_1, DECEMBER_1 = 1_793_491_200.0, 1_796_083_200.0  # 2026, UTC
EVERY = settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=True,
)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(DECEMBER_1 + 10 * DAY)


@pytest.fixture
def tenant(store: Store) -> str:
    return make_tenant(store)


def make_tenant(store: Store, name: str = "acme") -> str:
    with store.write() as write:
        return tenants.create(write, name=name, uid_base=None, actor="platform").id


def add(store: Store, *records: UsageRecord) -> ledger.LedgerInsert:
    with store.write() as write:
        return ledger.add(write, list(records))


def report(
    store: Store, tenant: str, by: str = "function", **cut: Any
) -> list[usage_reports.ReportLine]:
    with store.read() as sql:
        return usage_reports.report(
            sql, tenant=tenant, by=by, **{"since": None, "until": None, "environment": None, **cut}
        )


def differences(store: Store, tenant: str | None = None) -> Sequence[rollups.RollupDifference]:
    with store.read() as sql:
        return rollups.verify(sql, tenant=tenant)


def issue(store: Store, tenant: str, month: str, currency: str = "USD") -> dict[str, Any]:
    with store.write() as write:
        return invoices.issue(write, tenant=tenant, month=month, currency=currency, actor="k-1")


def show(store: Store, tenant: str, which: str, **more: Any) -> dict[str, Any]:
    with store.read() as sql:
        return invoices.show(sql, tenant=tenant, which=which, now=DECEMBER_1, **more)


picos = st.integers(min_value=-(10**20), max_value=10**18) | st.integers(min_value=-3, max_value=3)


@st.composite
def record(draw: st.DrawFn) -> UsageRecord:
    """A record at, near or far from the borders of hours, days and months."""
    cost = draw(picos)
    kind = (
        "ADJUSTMENT"
        if cost < 0
        else draw(st.sampled_from(["CALL", "CALL", "IDLE", "START", "ADJUSTMENT"]))
    )
    border = draw(
        st.sampled_from([NOVEMBER_1, DECEMBER_1, NOVEMBER_1 + 5 * DAY, NOVEMBER_1 + 3600])
    )
    started_at = border + draw(
        st.sampled_from([-1e-3, 0.0, 1e-3, 3599.999, -3600.0]) | st.floats(-2 * DAY, 2 * DAY)
    )
    return usage(
        f"req-{draw(st.integers(0, 30))}/1",
        kind=kind,
        cost=f"{Decimal(max(cost, -(2**62) + 1)).scaleb(-12):f}",
        started_at=started_at,
        function=draw(st.sampled_from(["embed", "rank"])),
        key=draw(st.sampled_from(["k-1", "k-2"])),
        caller=draw(st.sampled_from(["", "t-other"])),
        customer=draw(st.sampled_from(["", "ana", "bob"])),
        currency=draw(st.sampled_from(["USD", "USD", "EUR"])),
        status=draw(st.sampled_from([200, 500])),
        exec_ms=draw(st.integers(0, 10**6)),
        billed_ns=draw(st.integers(0, 10**15)),
        start_kind=draw(st.sampled_from(["WARM", "COLD"])),
    )


def first_of_each(batches: Sequence[Sequence[UsageRecord]]) -> list[UsageRecord]:
    kept: dict[str, UsageRecord] = {}
    for batch in batches:
        for one in batch:
            kept.setdefault(one.id, one)
    return list(kept.values())


@EVERY
@given(
    batches=st.lists(st.lists(record(), max_size=12), max_size=5),
    cut=st.tuples(st.integers(0, 999_999), st.integers(0, 999_999)),
)
@pytest.mark.slow  # hundreds of transactions with PostgreSQL
def test_a_bill_is_the_sum_of_its_records_to_the_last_digit(
    store: Store, batches: list[list[UsageRecord]], cut: tuple[int, int]
) -> None:
    owner = f"t-{uuid.uuid4().hex}"  # a tenant of its own per example: the database stays
    batches = [
        [replace(one, tenant=owner, id=f"{owner}/{one.id}") for one in batch] for batch in batches
    ]
    added = [add(store, *batch) for batch in batches]
    kept = first_of_each(batches)

    since, until = (NOVEMBER_1 - 3 * DAY + seconds * 6.25 for seconds in sorted(cut))
    for begin, end in ((None, None), (since, until), (NOVEMBER_1, DECEMBER_1)):
        within = [
            one
            for one in kept
            if (begin is None or one.started_at >= begin) and (end is None or one.started_at < end)
        ]
        for by in (*usage_reports.GROUPS, "tag:team"):
            found: dict[str, Decimal] = {}
            lines = report(store, owner, by, since=begin, until=end)
            for line in lines:
                found[line.currency] = found.get(line.currency, Decimal(0)) + line.cost
            wanted: dict[str, Decimal] = {}
            for one in within:
                wanted[one.currency] = wanted.get(one.currency, Decimal(0)) + Decimal(one.cost)
            assert found == wanted
            assert sum(line.records for line in lines) == len(within)
            assert sum(line.errors for line in lines) == sum(one.status >= 500 for one in within)
            assert sum(line.sums["billed_ns"] for line in lines) == sum(
                one.billed_ns for one in within
            )
        for name in ("customer", "key"):
            chosen = "ana" if name == "customer" else "k-1"
            lines = report(store, owner, name, since=begin, until=end, where={name: chosen})
            theirs = [one for one in within if getattr(one, name) == chosen]
            assert sum(line.records for line in lines) == len(theirs)
            assert sum(line.cost for line in lines) == sum(Decimal(one.cost) for one in theirs)
            assert {line.group[name] for line in lines} <= {chosen}
    assert sum(one.new for one in added) == len(kept)
    spent = [(key.customer, picos) for one in added for key, picos in one.spent.items()]
    costs = [(one.customer, Decimal(one.cost).scaleb(12)) for one in kept]
    assert sum(picos for customer, picos in spent if not customer) == sum(c for _, c in costs)
    assert sum(picos for customer, picos in spent if customer) == sum(
        cost for customer, cost in costs if customer
    )
    assert differences(store, owner) == []


def rows_of(store: Store, table: sa.Table, tenant: str) -> list[tuple[Any, ...]]:
    """A rollup's rows; doubles rounded, because they depend on the order of adding, and money in
    one number."""
    with store.read() as sql:
        found = [
            dict(row)
            for row in sql.execute(sa.select(table).where(table.c.tenant == tenant)).mappings()
        ]
    for row in found:
        row |= {name: float(f"{row[name]:.9g}") for name in tables.ROLLUP_FLOATS if name in row}
        if "high" in row:
            row["high"], row["low"] = row["high"] * ledger_totals.HALF + row["low"], 0
    return sorted(tuple(row.values()) for row in found)


@EVERY
@given(
    records=st.lists(record(), max_size=25, unique_by=lambda one: one.id), seed=st.integers(0, 9)
)
def test_rollups_are_what_a_rebuild_makes_of_the_records_in_whatever_order_they_came(
    store: Store, records: list[UsageRecord], seed: int
) -> None:
    owners = [f"t-{uuid.uuid4().hex}" for _ in range(2)]
    shuffled = list(records)
    random.Random(seed).shuffle(shuffled)
    add(store, *(replace(one, tenant=owners[0], id=f"{owners[0]}/{one.id}") for one in records))
    for at in range(0, len(shuffled), 4):
        add(
            store,
            *(
                replace(one, tenant=owners[1], id=f"{owners[1]}/{one.id}")
                for one in shuffled[at : at + 4]
            ),
        )
        add(
            store,
            *(
                replace(one, tenant=owners[1], id=f"{owners[1]}/{one.id}")
                for one in shuffled[: at + 1]
            ),
        )
    for table in (
        *(tables.usage_hours, tables.usage_days, tables.latency_hours),
        *(tables.customer_hours, tables.customer_days),
    ):
        kept = rows_of(store, table, owners[1])
        assert [row[1:] for row in rows_of(store, table, owners[0])] == [row[1:] for row in kept]
        with store.write() as write:
            assert rollups.rebuild(write, tenant=owners[1]) == len(records)
        assert rows_of(store, table, owners[1]) == kept
    assert differences(store, owners[1]) == []


@pytest.mark.parametrize("table", [tables.usage_days, tables.customer_hours], ids=str)
def test_a_rollup_that_is_off_by_a_picounit_is_told(store: Store, table: sa.Table) -> None:
    add(store, usage("req-1/1", customer="ana"), usage("req-2/1", tenant="t-2"))
    with store.write() as write:
        write.sql.execute(
            sa.update(table).where(table.c.tenant == "t-1").values(low=table.c.low + 1)
        )
    (found,) = differences(store)
    assert (found.table, found.tenant, found.found[1] - found.expected[1]) == (
        table.name,
        "t-1",
        1,
    )
    assert differences(store, "t-2") == []
    with store.write() as write:
        rollups.rebuild(write, tenant="t-1")
    assert differences(store) == []


def test_what_budgets_look_at_is_told_of_new_records_and_of_the_whole_batch(store: Store) -> None:
    one = usage("req-1/1", cost="0.5", started_at=NOVEMBER_1)
    other = usage("req-2/1", cost="0.25", started_at=NOVEMBER_1 - 1)
    here = SpendKey("t-1", "main", "search", "embed", int(NOVEMBER_1 // DAY), "2026-11", "USD")
    day = int(NOVEMBER_1 // DAY) - 1
    before = SpendKey("t-1", "main", "search", "embed", day, "2026-10", "USD")
    first, again = add(store, one), add(store, one, other, other)
    assert first.spent == first.batch == {here: 500_000_000_000}
    assert (again.new, again.spent) == (1, {before: 250_000_000_000})
    assert again.batch == {here: 500_000_000_000, before: 2 * 250_000_000_000}


def test_calls_of_shared_functions_are_reported_by_caller_and_tags_by_revision(
    store: Store, tenant: str
) -> None:
    with store.write() as write:
        values = {"tenant": tenant, "environment": "main"}
        write.sql.execute(
            sa.insert(tables.apps).values(
                **values, name="a", version=1, stopped=False, created_at=0, updated_at=0
            )
        )
        write.sql.execute(
            sa.insert(tables.functions).values(
                **values, id="f-1", app="a", name="f", revisions=1, created_at=0
            )
        )
        revision = {"function": "f-1", "digest": "d", "ordinal": 1, "created_at": 0}
        write.sql.execute(
            sa.insert(tables.revisions).values(
                **revision, name="v1", spec='{"tags": {"team": "search"}}'
            )
        )
    add(
        store,
        usage("req-1/1", tenant=tenant, revision="v1", cost="1", caller="t-9"),
        usage("req-2/1", tenant=tenant, revision="v2", cost="2"),
    )
    assert [(line.group, line.cost) for line in report(store, tenant, "tag:team")] == [
        ({"tag:team": ""}, Decimal(2)),
        ({"tag:team": "search"}, Decimal(1)),
    ]
    assert [(line.group["caller"], line.cost) for line in report(store, tenant, "caller")] == [
        ("", Decimal(2)),
        ("t-9", Decimal(1)),
    ]
    with pytest.raises(InvalidInput, match="by = 'colour'"):
        report(store, tenant, "colour")


def test_hours_and_days_are_those_of_utc(store: Store) -> None:
    add(
        store,
        *(
            usage(f"req-{n}/1", started_at=DECEMBER_1 + at, cost="1")
            for n, at in enumerate((-0.001, 0.0, 3599.999, 3600.0))
        ),
    )
    hours = [(line.group["hour"], line.records) for line in report(store, "t-1", "hour")]
    assert hours == [("2026-11-30T23:00Z", 1), ("2026-12-01T00:00Z", 2), ("2026-12-01T01:00Z", 1)]
    cut = report(store, "t-1", "hour", since=DECEMBER_1 - 1, until=DECEMBER_1 + 3599.5)
    assert [(line.group["hour"], line.records) for line in cut] == [
        ("2026-11-30T23:00Z", 1),
        ("2026-12-01T00:00Z", 1),
    ]
    assert [line.records for line in report(store, "t-1", "day", since=DECEMBER_1)] == [3]


def test_every_clock_of_every_call_is_in_a_bucket_that_holds_up_to_it(store: Store) -> None:
    times = [0, 1, 7, 30, 31, 2000, 90_000]
    records = [
        usage(f"req-{n}/1", queued_ms=0, start_ms=ms if ms > 1000 else 0, exec_ms=ms)
        for n, ms in enumerate(times)
    ]
    add(store, *records, usage("i-1/IDLE/1", kind="IDLE", exec_ms=10**9))
    found: dict[str, Counter[int]] = {clock: Counter() for clock in CLOCKS}
    with store.read() as sql:
        for row in sql.execute(sa.select(tables.latency_hours)):
            assert (row.hour, row.start_kind) == (int(records[0].started_at) // 3600, "WARM")
            found[row.clock][row.bucket] += row.calls
    assert found["exec"] == Counter(bucket_of(ms) for ms in times)
    assert found["total"] == Counter(bucket_of(ms if ms < 1000 else 2 * ms) for ms in times)
    assert found["queue"] == {0: 7}
    assert found["start"] == {0: 5, bucket_of(2000): 1, bucket_of(90_000): 1}
    assert all(1.1 ** (bucket_of(ms) - 1) < ms <= 1.1 ** bucket_of(ms) for ms in times if ms > 1)


@pytest.mark.parametrize("ms, bucket", [(0, 0), (1, 0), (2, 8), (10**12, 239)])
def test_a_time_falls_into_the_bucket_that_holds_up_to_it(ms: int, bucket: int) -> None:
    assert bucket_of(ms) == bucket


# -- invoices --------------------------------------------------------------------------------------
def test_an_invoice_is_frozen_and_what_comes_late_is_on_the_next(store: Store, tenant: str) -> None:
    add(store, usage("req-1/1", tenant=tenant, cost="1.5", started_at=DECEMBER_1 - 0.001))
    draft = show(store, tenant, "2026-11")
    made = issue(store, tenant, "2026-11")
    add(
        store,
        usage("req-2/1", tenant=tenant, cost="0.25", started_at=NOVEMBER_1 + 9),
        usage("req-3/1", tenant=tenant, cost="4", started_at=DECEMBER_1),
    )
    assert (draft["status"], draft["id"], draft["total"]) == ("draft", None, "1.500000000000")
    assert show(store, tenant, made["id"]) == show(store, tenant, "2026-11") == made
    following = show(store, tenant, "2026-12")
    assert (following["total"], following["late"]) == (
        "4.250000000000",
        {"2026-11": "0.250000000000"},
    )
    # by time, not by invoice
    assert [line.cost for line in report(store, tenant, since=NOVEMBER_1, until=DECEMBER_1)] == [
        Decimal("1.75")
    ]
    with pytest.raises(Conflict, match=made["id"]):
        issue(store, tenant, "2026-11")


def test_late_records_pass_over_every_month_that_is_issued(
    store: Store, tenant: str, clock: ManualClock
) -> None:
    clock.now = DECEMBER_1 + 100 * DAY
    for n, at in enumerate((NOVEMBER_1, DECEMBER_1)):
        add(store, usage(f"req-{n}/1", tenant=tenant, cost="1", started_at=at))
    for month in ("2026-11", "2026-12"):
        issue(store, tenant, month)
    add(
        store,
        usage("req-9/1", tenant=tenant, cost="2", started_at=NOVEMBER_1),
        usage("req-8/1", tenant=tenant, cost="3", currency="EUR", started_at=NOVEMBER_1),
    )
    with store.read() as sql:
        listed = {
            (row["month"], row["currency"]): (row["status"], row["total"])
            for row in invoices.listing(sql, tenant=tenant)
        }
    assert listed == {
        ("2027-01", "USD"): ("draft", "2.000000000000"),
        ("2026-12", "USD"): ("issued", "1.000000000000"),
        ("2026-11", "USD"): ("issued", "1.000000000000"),
        ("2026-11", "EUR"): ("draft", "3.000000000000"),  # in another currency nothing was issued
    }
    with pytest.raises(InvalidInput, match="EUR"):
        show(store, tenant, "2026-11")
    assert show(store, tenant, "2026-11", currency="EUR")["total"] == "3.000000000000"


@EVERY
@given(
    steps=st.lists(
        st.one_of(record(), st.sampled_from(["2026-10", "2026-11", "2026-12"])), max_size=30
    )
)
@pytest.mark.slow  # hundreds of transactions with PostgreSQL
def test_all_invoices_together_are_all_records(
    store: Store, clock: ManualClock, steps: list[UsageRecord | str]
) -> None:
    clock.now = DECEMBER_1 + 100 * DAY
    owner = make_tenant(store, f"t{uuid.uuid4().hex[:20]}")
    kept: dict[str, UsageRecord] = {}
    frozen: dict[str, dict[str, Any]] = {}
    for step in steps:
        if isinstance(step, str):
            with store.read() as sql:
                asked = invoices.open_in(sql, month=step, tenant=owner)
            for _, currency in asked:
                made = issue(store, owner, step, currency)
                frozen[made["id"]] = made
        else:
            add(store, one := replace(step, tenant=owner, id=f"{owner}/{step.id}"))
            kept.setdefault(one.id, one)
    with store.read() as sql:
        listed = invoices.listing(sql, tenant=owner)
    sums: Counter[str] = Counter()
    for row in listed:
        sums[row["currency"]] += int(Decimal(row["total"]).scaleb(12))
        document = show(store, owner, row["id"] or row["month"], currency=row["currency"])
        lines = sum(Decimal(line["cost"]) for line in document["lines"])
        assert (
            lines
            == sum(Decimal(line["cost"]) for line in invoices.rows(document))
            == Decimal(row["total"])
        )
        assert row["id"] is None or frozen[row["id"]] == document
    wanted: Counter[str] = Counter()
    for one in kept.values():
        wanted[one.currency] += int(Decimal(one.cost).scaleb(12))
    assert {k: v for k, v in sums.items() if v} == {k: v for k, v in wanted.items() if v}
    assert differences(store, owner) == []


def test_numbers_of_invoices_rise_without_gaps_and_a_month_must_be_over(
    store: Store, tenant: str, clock: ManualClock
) -> None:
    other = make_tenant(store, "umbrella")
    for owner in (tenant, other):
        add(store, usage(f"{owner}/1", tenant=owner, started_at=NOVEMBER_1))
    clock.now = DECEMBER_1 - 1
    with pytest.raises(InvalidInput, match="not over"):
        issue(store, tenant, "2026-11")
    clock.now = DECEMBER_1
    with pytest.raises(NotFound, match="no usage in USD"):
        issue(store, tenant, "2026-10")
    assert [issue(store, owner, "2026-11")["id"] for owner in (tenant, other)] == [
        "inv-000001",
        "inv-000002",
    ]
    for wrong in ("2026-13", "november", "2026-11-01"):
        with pytest.raises(InvalidInput, match="write it like"):
            issue(store, tenant, wrong)


def test_another_tenants_invoice_does_not_exist(store: Store, tenant: str) -> None:
    add(store, usage("req-1/1", tenant=tenant, started_at=NOVEMBER_1))
    made = issue(store, tenant, "2026-11")
    for which in (made["id"], "2026-11", "inv-000009", "'; DROP TABLE invoices; --"):
        with pytest.raises(NotFound):
            show(store, "t-other", which)


def test_invoices_are_due_some_days_after_their_month_and_a_clock_that_jumps_back_takes_none_back(
    store: Store, tenant: str, clock: ManualClock
) -> None:
    add(
        store,
        usage("req-1/1", tenant=tenant, started_at=NOVEMBER_1),
        usage("req-2/1", tenant=tenant, started_at=DECEMBER_1),
    )

    def due(now: float) -> list[tuple[str, str, str]]:
        with store.read() as sql:
            return invoices.due(sql, now=now, after_days=3, limit=9)

    assert due(DECEMBER_1 + 3 * DAY - 1) == []
    assert due(DECEMBER_1 + 3 * DAY) == [(tenant, "2026-11", "USD")]
    made = issue(store, tenant, "2026-11")
    assert due(DECEMBER_1 + 3 * DAY) == []
    # and activators' clocks with it: what they write down now is of a closed month
    clock.now = NOVEMBER_1 + DAY
    add(store, usage("req-3/1", tenant=tenant, cost="7", started_at=NOVEMBER_1 + DAY))
    assert show(store, tenant, made["id"]) == made
    assert show(store, tenant, "2026-12")["late"] == {"2026-11": "7.000000000000"}
    with pytest.raises(InvalidInput, match="not over"):
        issue(store, tenant, "2026-12")


# -- corrections -----------------------------------------------------------------------------------
def correct(store: Store, record: str, amount: str, request: str = "") -> UsageRecord:
    with store.write() as write:
        return corrections.correct(
            write, record=record, amount=amount, note="charged twice", actor="k-1", request=request
        )


def test_a_correction_is_a_further_record_and_gives_back_at_most_what_was_charged(
    store: Store, tenant: str
) -> None:
    add(store, usage("req-1/1", tenant=tenant, cost="0.5", started_at=NOVEMBER_1))
    issue(store, tenant, "2026-11")
    made = correct(store, "req-1/1", "-0.3")
    assert (made.kind, made.cost, made.corrects, made.started_at) == (
        "ADJUSTMENT",
        "-0.300000000000",
        "req-1/1",
        NOVEMBER_1,
    )
    with pytest.raises(InvalidInput, match=r"has charged 0\.200000000000 USD"):
        correct(store, "req-1/1", "-0.200000000001")
    correct(store, "req-1/1", "-0.2")
    correct(store, "req-1/1", "0.1")
    assert sum(line.cost for line in report(store, tenant)) == Decimal("0.1")
    document = show(store, tenant, "2026-12")
    assert {(one["corrects"], one["note"]) for one in document["corrections"]} == {
        ("req-1/1", "charged twice")
    }
    assert sorted(one["cost"] for one in document["corrections"]) == [
        "-0.200000000000",
        "-0.300000000000",
        "0.100000000000",
    ]
    assert document["total"] == "-0.400000000000"
    assert differences(store) == []


def test_the_same_request_is_the_same_correction(store: Store, tenant: str) -> None:
    add(store, usage("req-1/1", tenant=tenant, cost="0.5"))
    assert correct(store, "req-1/1", "-0.5", "req-a") == correct(store, "req-1/1", "-0.5", "req-a")
    with pytest.raises(InvalidInput):
        correct(store, "req-1/1", "-0.5", "req-b")


@pytest.mark.parametrize("amount", ["0", "NaN", "Infinity", "much", "0.0000000000001"])
def test_an_amount_that_is_none_corrects_nothing(store: Store, tenant: str, amount: str) -> None:
    add(store, usage("req-1/1", tenant=tenant))
    with pytest.raises(InvalidInput, match="amount"):
        correct(store, "req-1/1", amount)
    with pytest.raises(NotFound):
        correct(store, "req-9/1", "1")


def test_a_correction_is_not_corrected(store: Store, tenant: str) -> None:
    add(store, usage("req-1/1", tenant=tenant))
    made = correct(store, "req-1/1", "1")
    with pytest.raises(InvalidInput, match="is itself a correction"):
        correct(store, made.id, "1")


# -- prices ----------------------------------------------------------------------------------------
def test_a_version_of_prices_never_changes(store: Store, clock: ManualClock) -> None:
    def keep(**changes: Any) -> list[str]:
        with store.write() as write:
            return price_lists.record_price_lists(write, PriceSettings(**changes).lists())

    assert keep(version="1", request="0.10", others={"1-partner": {"request": "0.05"}}) == [
        "1",
        "1-partner",
    ]
    assert keep(version="1", request="0.1") == []
    with pytest.raises(
        SettingsInvalid,
        match=r"request = '0\.2' in version '1', which was in effect with '0\.10'.*new version",
    ):
        keep(version="1", request="0.2")
    with pytest.raises(SettingsInvalid, match="gpu_s"):
        keep(version="1", request="0.1", gpu_s={"H100": "1"})
    clock.now += 1
    assert keep(version="2", request="0.2") == ["2"]
    with store.read() as sql:
        assert [(one["version"], one["request"]) for one in price_lists.listing(sql)] == [
            ("2", "0.2"),
            ("1", "0.10"),
            ("1-partner", "0.05"),
        ]


# -- exports ---------------------------------------------------------------------------------------
def test_an_export_goes_on_after_the_record_that_came_last(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_exports, "PAGE", 3)
    records = [usage(f"req-{n:02}/1", started_at=NOVEMBER_1 + n // 4) for n in range(20)]
    add(store, *records, usage("req-99/1", tenant="t-2", started_at=NOVEMBER_1))
    wanted = usage_exports.ExportQuery(tenant="t-1")

    def ids(
        after: tuple[float, str] | None = None,
        limit: int | None = None,
        wanted: usage_exports.ExportQuery = wanted,
    ) -> list[str]:
        return [
            one["id"]
            for page in usage_exports.pages(store, wanted, after=after, limit=limit)
            for one in page
        ]

    everything = [one.id for one in records]
    assert ids() == everything
    first = ids(limit=7)
    with store.read() as sql:
        after = usage_exports.position(sql, tenant="t-1", cursor=first[-1])
        with pytest.raises(NotFound):
            usage_exports.position(sql, tenant="t-2", cursor=first[-1])
    assert first + ids(after) == everything
    assert (
        ids(wanted=replace(wanted, since=NOVEMBER_1 + 1, until=NOVEMBER_1 + 2)) == everything[4:8]
    )
    assert ids(wanted=replace(wanted, month="2026-11")) == everything
    assert (
        ids(wanted=replace(wanted, month="2026-10"))
        == ids(wanted=replace(wanted, environment="staging"))
        == []
    )
