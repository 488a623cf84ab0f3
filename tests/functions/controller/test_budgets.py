"""Budgets against the ledger: what is spent, and which thresholds are alerted, whatever way the
records come."""

from __future__ import annotations

import datetime as dt
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pilotlight.controller.billing import budget_alerts, ledger
from pilotlight.controller.billing.budget_definition import parse_definition
from pilotlight.controller.billing.budget_periods import DAY_S, day_of, period_of
from pilotlight.controller.billing.budgets import changes, records, spending
from pilotlight.controller.billing.budgets.records import Budget
from pilotlight.controller.database import feed, tables
from pilotlight.controller.database.store import Store
from pilotlight.controller.identity import tenants
from pilotlight.core.crypto import PlatformKey
from pilotlight.errors import Conflict, NotFound
from pilotlight.protocol import BudgetState, UsageRecord
from tests.functions.controller.parts import ManualClock, usage
from tests.hypothesis_profiles import examples

NOON = dt.datetime(2026, 11, 15, 12, tzinfo=dt.UTC).timestamp()
UNIT = 10**12


@pytest.fixture(name="key", scope="module")
def _key(tmp_path_factory: pytest.TempPathFactory) -> PlatformKey:
    return PlatformKey.load_or_create(tmp_path_factory.mktemp("key") / "platform.key")


class Books:
    """A tenant with a ledger and budgets."""

    def __init__(self, store: Store, key: PlatformKey) -> None:
        self.store = store
        self._key = key
        with store.write() as write:
            self.tenant = tenants.create(write, name="acme", uid_base=None, actor="platform").id

    def put(
        self,
        amount: str = "10",
        *,
        webhook: str | None = "https://example.com/hook",
        new_secret: bool = False,
        **terms: Any,
    ) -> Budget:
        return self.put_with_secret(amount, webhook=webhook, new_secret=new_secret, **terms)[0]

    def put_with_secret(
        self,
        amount: str = "10",
        *,
        webhook: str | None = None,
        new_secret: bool = False,
        **terms: Any,
    ) -> tuple[Budget, str | None]:
        wanted = parse_definition(
            amount=amount,
            webhook=webhook,
            **{"currency": "USD", "currencies": {"USD", "EUR"}, **terms},
        )
        with self.store.write() as write:
            placed = changes.put(
                write,
                key=self._key,
                tenant=self.tenant,
                terms=wanted,
                actor="k-1",
                new_secret=new_secret,
            )
        return placed.budget, placed.secret

    def spend(
        self, *costs: str, id: str = "", at: float = NOON, **changes: Any
    ) -> dict[str, BudgetState]:
        """Ship records of these costs."""
        records = [
            self.record(cost, id=f"{id or f'req-{at}-{len(changes)}-{cost}'}/{n}", at=at, **changes)
            for n, cost in enumerate(costs, 1)
        ]
        return self.ship(records)

    def record(self, cost: str, *, id: str, at: float = NOON, **changes: Any) -> UsageRecord:
        return usage(id, tenant=self.tenant, cost=f"{Decimal(cost):.12f}", started_at=at, **changes)

    def ship(self, records: Sequence[UsageRecord]) -> dict[str, BudgetState]:
        with self.store.write() as write:
            added = ledger.add(write, records)
            return spending.after_usage(write, new=added.spent, batch=added.batch)

    def alerted(self, budget: Budget) -> list[tuple[str, int]]:
        """(period, percent) of its alerts, by period."""
        with self.store.read() as sql:
            return sorted(
                (a.period, a.percent) for a in budget_alerts.listing(sql, budgets=[budget.id])
            )

    def states(self, now: float) -> dict[str, BudgetState]:
        with self.store.read() as sql:
            return spending.states(sql, now=now)

    def fed(self) -> dict[str, Any]:
        with self.store.read() as sql:
            page = feed.read(sql, after=0, limit=100)
        return {
            change["key"]: change["value"]
            for text in page.changes
            if (change := json.loads(text))["kind"] == "budget"
        }


@pytest.fixture(name="books")
def _books(store: Store, clock: ManualClock, key: PlatformKey) -> Books:
    clock.now = NOON
    return Books(store, key)


@pytest.mark.parametrize(
    "terms, is_covered",
    [
        ({}, True),
        ({"environment": "main"}, True),
        ({"environment": "staging"}, False),
        ({"app": "search"}, True),
        ({"app": "other"}, False),
        ({"app": "search", "function": "embed"}, True),
        ({"app": "search", "function": "other"}, False),
        ({"environment": "main", "app": "search", "function": "embed"}, True),
        ({"environment": "staging", "app": "search", "function": "embed"}, False),
        ({"currency": "EUR"}, False),
        ({"period": "day"}, True),
    ],
)
def test_a_budget_covers_the_records_of_its_reach_and_no_others(
    books: Books, terms: dict[str, Any], is_covered: bool
) -> None:
    budget = books.put(**terms)
    answer = books.spend("4", "0.000000000001")

    wanted = BudgetState(
        period="2026-11-15" if terms.get("period") == "day" else "2026-11",
        spent="4.000000000001",
        batch="4.000000000001",
    )
    assert answer == ({budget.id: wanted} if is_covered else {})
    assert Decimal(books.states(NOON)[budget.id].spent) == (
        Decimal("4.000000000001") if is_covered else 0
    )


def test_another_tenants_records_are_not_counted(books: Books) -> None:
    books.put()
    assert books.ship([usage("req-9/1", started_at=NOON)]) == {}


def test_records_that_come_again_are_in_the_batch_and_spent_once(books: Books) -> None:
    budget = books.put()
    first, second = books.record("3", id="a/1"), books.record("2", id="b/1")
    books.ship([first])
    assert books.ship([first, second]) == {
        budget.id: BudgetState(period="2026-11", spent="5.000000000000", batch="5.000000000000")
    }
    assert books.ship([first]) == {
        budget.id: BudgetState(period="2026-11", spent="5.000000000000", batch="3.000000000000")
    }


def test_a_record_that_costs_nothing_names_its_budget(books: Books) -> None:
    budget = books.put()
    assert books.spend("0")[budget.id] == BudgetState(period="2026-11", spent="0", batch="0")


def test_the_day_of_a_record_is_that_on_which_it_began(books: Books, clock: ManualClock) -> None:
    midnight = dt.datetime(2026, 12, 1, tzinfo=dt.UTC).timestamp()
    daily, monthly = books.put(period="day"), books.put(period="month")
    clock.now = midnight + 1

    answer = books.ship(
        [books.record("7", id="a/1", at=midnight - 0.001), books.record("2", id="b/1", at=midnight)]
    )

    assert answer[daily.id] == BudgetState(
        period="2026-12-01", spent="2.000000000000", batch="2.000000000000"
    )
    assert answer[monthly.id] == BudgetState(
        period="2026-12", spent="2.000000000000", batch="2.000000000000"
    )
    assert books.alerted(daily) == [("2026-11-30", 50)]
    assert books.alerted(monthly) == [("2026-11", 50)]
    assert Decimal(books.states(midnight - 1)[daily.id].spent) == 7


def test_a_new_period_begins_with_nothing_spent_and_alerts_again(
    books: Books, clock: ManualClock
) -> None:
    budget = books.put(period="day")
    books.spend("9", at=NOON)
    clock.now = NOON + DAY_S
    assert books.states(clock.now)[budget.id] == BudgetState(period="2026-11-16", spent="0")
    books.spend("5", at=clock.now)
    assert books.alerted(budget) == [("2026-11-15", 50), ("2026-11-15", 80), ("2026-11-16", 50)]


def test_a_late_record_does_not_alert_for_a_time_before_its_budget(books: Books) -> None:
    budget = books.put(period="day")
    books.spend("10", at=NOON - DAY_S)
    assert books.alerted(budget) == []


def test_a_record_from_an_impossible_future_alerts_nobody(books: Books) -> None:
    budget = books.put()
    books.spend("10", at=dt.datetime(9999, 12, 31, tzinfo=dt.UTC).timestamp())
    assert books.alerted(budget) == []


def test_a_threshold_is_reached_at_exactly_its_share(books: Books) -> None:
    budget = books.put("0.000000000200", alerts=[50, 100])
    books.spend("0.000000000099")
    assert books.alerted(budget) == []
    books.spend("0.000000000001")
    assert books.alerted(budget) == [("2026-11", 50)]
    books.spend("0.000000000100", id="c")
    assert books.alerted(budget) == [("2026-11", 50), ("2026-11", 100)]


def test_a_credit_lowers_what_is_spent_and_leaves_the_alert(books: Books) -> None:
    budget = books.put()
    books.spend("5")
    answer = books.ship(
        [books.record("-2", id="adjust/1", kind="ADJUSTMENT", corrects="a/1", note="wrong")]
    )
    assert Decimal(answer[budget.id].spent) == 3
    books.spend("2", id="again")
    assert books.alerted(budget) == [("2026-11", 50)]


def test_a_budget_that_is_reached_when_it_is_made_alerts_at_once(books: Books) -> None:
    books.spend("9")
    assert books.alerted(books.put()) == [("2026-11", 50), ("2026-11", 80)]


def test_a_higher_amount_lets_thresholds_alert_again(books: Books) -> None:
    budget = books.put("10")
    books.spend("10")
    assert books.alerted(budget) == [("2026-11", 50), ("2026-11", 80), ("2026-11", 100)]
    assert books.put("20").id == budget.id
    assert books.alerted(budget) == [("2026-11", 50)]
    books.spend("6", id="more")
    assert books.alerted(budget) == [("2026-11", 50), ("2026-11", 80)]


def test_soft_and_hard_ones_reach_the_activators_and_a_change_reaches_them_too(
    books: Books,
) -> None:
    hard, soft = books.put("10"), books.put("2.50", app="search", hard=False)
    assert books.fed()[hard.id] == {
        "id": hard.id,
        "tenant": books.tenant,
        "environment": "",
        "app": "",
        "function": "",
        "period": "month",
        "amount": "10",
        "currency": "USD",
        "hard": True,
    }
    assert (books.fed()[soft.id]["hard"], books.fed()[soft.id]["amount"]) == (False, "2.5")
    books.put("11")
    assert books.fed()[hard.id]["amount"] == "11"


def test_a_deleted_budget_is_gone_everywhere(books: Books) -> None:
    budget = books.put()
    books.spend("6")
    with books.store.write() as write:
        changes.delete(write, tenant=books.tenant, budget_id=budget.id, actor="k-1")
    assert books.fed() == {budget.id: None}
    assert (books.alerted(budget), books.states(NOON)) == ([], {})
    assert books.spend("6", id="later") == {}
    with pytest.raises(NotFound), books.store.write() as write:
        changes.delete(write, tenant=books.tenant, budget_id=budget.id, actor="k-1")


def test_a_secret_stays_with_its_webhook_and_not_with_another(
    books: Books, key: PlatformKey
) -> None:
    first, secret = books.put_with_secret(webhook="https://a.example/x")
    assert secret is not None
    assert key.webhooks.open(first.sealed_secret or "") == secret
    kept, none = books.put_with_secret("12", webhook="https://a.example/x")
    assert (kept.sealed_secret, none) == (first.sealed_secret, None)
    _, other = books.put_with_secret(webhook="https://b.example/x")
    _, renewed = books.put_with_secret(webhook="https://b.example/x", new_secret=True)
    assert len({secret, other, renewed}) == 3
    without, none = books.put_with_secret(webhook=None, new_secret=True)
    assert (without.sealed_secret, none) == (None, None)


def test_there_is_a_bound_of_how_many(books: Books) -> None:
    books.put()
    row = {
        "tenant": books.tenant,
        "environment": "",
        "function": "",
        "period": "month",
        "amount": "1",
        "currency": "USD",
        "hard": True,
        "alerts": "[]",
        "created_at": 1.0,
        "updated_at": 1.0,
    }
    rows = [{**row, "id": f"b-{n}", "app": f"app-{n}"} for n in range(records.MAX_BUDGETS - 1)]
    with books.store.write() as write:
        write.sql.execute(sa.insert(tables.budgets), rows)
    books.put("99")
    with pytest.raises(Conflict, match="delete one first"):
        books.put(app="b")


def test_an_overview_has_spending_forecast_and_the_alerts_of_this_period(
    books: Books, clock: ManualClock
) -> None:
    budget = books.put(period="day", amount="40")
    for n in range(1, 9):
        books.spend("24", at=NOON - n * DAY_S)
    clock.now = NOON
    books.spend("30")
    with books.store.read() as sql:
        seen = spending.overview(sql, tenant=books.tenant, now=NOON)[0]
    assert (seen.budget.id, seen.period.name, seen.spent, seen.percent) == (
        budget.id,
        "2026-11-15",
        30 * UNIT,
        75.0,
    )
    assert [alert.percent for alert in seen.alerts] == [50]
    assert seen.forecast is not None
    assert (seen.forecast.expected, seen.forecast.basis_days, seen.forecast.reached_at) == (
        42 * UNIT,
        7,
        NOON + 10 / 24 * DAY_S,
    )


# -- whatever way the records come -----------------------------------------------------------------
RECORDS = st.lists(
    st.tuples(
        st.sampled_from(["main", "staging"]),
        st.sampled_from(["search", "rank"]),
        st.sampled_from(["embed", "score"]),
        st.integers(-20, 0),
        st.integers(0, 4 * UNIT),
    ),
    max_size=24,
)
REACHES: list[dict[str, Any]] = [
    {},
    {"environment": "main"},
    {"app": "search"},
    {"app": "search", "function": "embed"},
    {"period": "day"},
    {"period": "day", "environment": "staging", "app": "rank", "function": "score"},
]


@given(
    records=RECORDS,
    order=st.randoms(use_true_random=False),
    sizes=st.lists(st.integers(1, 6), min_size=1),
    amount=st.integers(1, 30 * UNIT),
)
@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@pytest.mark.slow  # forty ledgers
def test_every_threshold_is_alerted_once_and_spent_is_the_sum_of_the_ledger(
    *,
    records: list[tuple[str, str, str, int, int]],
    order: Any,
    sizes: list[int],
    amount: int,
    empty_database: bytes,
    key: PlatformKey,
) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="pl") as home,
        Opened(Path(home), empty_database) as (store, clock),
    ):
        clock.now = NOON - 30 * DAY_S
        books = Books(store, key)
        made = [
            books.put(f"{Decimal(amount).scaleb(-12):f}", alerts=[1, 50, 80, 100, 250], **reach)
            for reach in REACHES
        ]
        clock.now = NOON
        sent = [
            replace(
                books.record(
                    "0", id=f"r{n}/1", at=NOON + day * DAY_S, environment=e, app=a, function=f
                ),
                cost=f"{Decimal(c).scaleb(-12):.12f}",
            )
            for n, (e, a, f, day, c) in enumerate(records)
        ]
        twice = sent + sent[::2]
        order.shuffle(twice)
        for batch in _split(twice, sizes):
            books.ship(batch)

        states = books.states(NOON)
        for budget in made:
            expected = _spent(budget, sent)
            assert (
                Decimal(states[budget.id].spent).scaleb(12) == expected[budget.period_at(NOON).name]
            )
            reached = [
                (name, p)
                for name, spent in expected.items()
                for p in budget.terms.alerts
                if spent * 100 >= amount * p
            ]
            assert books.alerted(budget) == sorted(reached)


def _spent(budget: Budget, sent: Sequence[UsageRecord]) -> Counter[str]:
    """By the records themselves, and by their texts."""
    terms, out = budget.terms, Counter[str]()
    for record in sent:
        if all(
            mine in ("", theirs)
            for mine, theirs in zip(
                budget.reach[1:4], (record.environment, record.app, record.function), strict=True
            )
        ):
            out[period_of(terms.period, day_of(record.started_at)).name] += int(
                Decimal(record.cost).scaleb(12)
            )
    return out


def _split(records: Sequence[UsageRecord], sizes: Sequence[int]) -> Iterator[Sequence[UsageRecord]]:
    at, n = 0, 0
    while at < len(records):
        yield records[at : at + sizes[n % len(sizes)]]
        at, n = at + sizes[n % len(sizes)], n + 1


class Opened:
    """A store of its own for one example."""

    def __init__(self, home: Path, empty: bytes) -> None:
        (home / "controller.db").write_bytes(empty)
        self.clock = ManualClock()
        self.store = Store(f"sqlite:///{home / 'controller.db'}", clock=self.clock)

    def __enter__(self) -> tuple[Store, ManualClock]:
        return self.store, self.clock

    def __exit__(self, *_: object) -> None:
        self.store.close()
