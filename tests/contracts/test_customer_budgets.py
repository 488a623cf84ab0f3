"""Budgets of customers, on SQLite and on PostgreSQL alike: who gets one, what it covers, and that a
flood of customers makes no more of them than a tenant may have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from pilotlight.controller.billing import budget_alerts, usage_ingestion
from pilotlight.controller.billing.budget_definition import BudgetDefinition
from pilotlight.controller.billing.budgets import changes, records, spending
from pilotlight.controller.customers import budgets as customer_budgets
from pilotlight.controller.customers import quotas
from pilotlight.controller.database import store as stores
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store
from pilotlight.controller.identity import tenants
from pilotlight.core.crypto import PlatformKey
from pilotlight.errors import Conflict, InvalidInput, TooManyRequests
from pilotlight.protocol import BudgetState
from pilotlight.spec.identifiers import ANY_CUSTOMER
from tests.functions.controller.parts import ManualClock, usage

KEY = PlatformKey(b"0123456789abcdef0123456789abcdef")
NOW = 1_800_000_000.0


@pytest.fixture
def tenant(store: Store) -> str:
    with store.write() as write:
        return tenants.create(write, name="acme", uid_base=None, actor="platform").id


def put(store: Store, tenant: str, customer: str, amount: str = "10", **terms: Any) -> str:
    given = BudgetDefinition(amount=amount, currency="USD", customer=customer, **terms)
    with store.write() as write:
        return changes.put(write, key=KEY, tenant=tenant, terms=given, actor="k").budget.id


def derive(store: Store, tenant: str, customer: str) -> int:
    with store.write() as write:
        return customer_budgets.derive(write, tenant=tenant, customer=customer)


def of(store: Store, tenant: str, customer: str) -> list[tuple[str, str | None]]:
    with store.read() as sql:
        found = records.of_customer(sql, tenant=tenant, customer=customer)
    return [(budget.terms.amount, budget.parent) for budget in found]


def use(store: Store, tenant: str, *costs: tuple[str, str]) -> dict[str, BudgetState]:
    """Record calls of (customer, cost); returns the states of budgets."""
    rows = [
        usage(f"{id(costs)}-{n}/1", tenant=tenant, customer=customer, cost=cost, started_at=NOW)
        for n, (customer, cost) in enumerate(costs)
    ]
    with store.write() as write:
        return usage_ingestion.ingest_usage(write, [one.to_json() for one in rows])[1]


def fed(store: Store) -> dict[str, Any]:
    with store.read() as sql:
        rows = sql.execute(
            sa.select(tables.feed.c.key, tables.feed.c.value)
            .where(tables.feed.c.kind == "budget")
            .order_by(tables.feed.c.seq)
        ).all()
    return {row.key: row.value for row in rows}


def test_a_customer_gets_one_of_each_budget_that_it_has_not(store: Store, tenant: str) -> None:
    month = put(store, tenant, ANY_CUSTOMER)
    day = put(store, tenant, ANY_CUSTOMER, "1", period="day")
    put(store, tenant, "ben", "50")
    assert [derive(store, tenant, name) for name in ("ana", "ana", "ben", "ben")] == [2, 0, 1, 0]
    assert sorted(of(store, tenant, "ana")) == [("1", day), ("10", month)]
    assert sorted(of(store, tenant, "ben"), key=str) == [("1", day), ("50", None)]
    assert derive(store, "t-2", "ana") == 0


def test_a_budget_covers_the_calls_for_its_customer_alone(store: Store, tenant: str) -> None:
    whole, ana = put(store, tenant, ""), put(store, tenant, "ana")
    put(store, tenant, "ben")
    states = use(store, tenant, ("ana", "1"), ("ana", "2"), ("", "4"))
    assert {name: (one.spent, one.batch) for name, one in states.items()} == {
        whole: ("7.000000000000", "7.000000000000"),
        ana: ("3.000000000000", "3.000000000000"),
    }
    with store.read() as sql:
        found = spending.states(sql, now=NOW)
        shares = spending.shares(sql, now=NOW)
    assert sorted(one.spent for one in found.values()) == ["0", "3.000000000000", "7.000000000000"]
    assert shares == {(tenant, whole): 0.7}, "no series of metrics for each customer"


def test_alerts_are_of_the_customer_that_spends(store: Store, tenant: str) -> None:
    put(store, tenant, ANY_CUSTOMER, alerts=(50,))
    for name in ("ana", "ben"):
        derive(store, tenant, name)
    use(store, tenant, ("ana", "6"), ("ben", "1"))
    with store.read() as sql:
        (ana,) = records.of_customer(sql, tenant=tenant, customer="ana")
        every = [budget.id for budget in records.listing(sql)]
        (alert,) = budget_alerts.listing(sql, budgets=every)
    assert (alert.budget, alert.percent, alert.spent) == (ana.id, 50, "6.000000000000")


def test_what_customers_have_follows_the_budget_that_it_comes_from(
    store: Store, tenant: str
) -> None:
    parent = put(store, tenant, ANY_CUSTOMER)
    derive(store, tenant, "ana")
    derive(store, tenant, "ben")
    put(store, tenant, "ben", "50")
    put(store, tenant, ANY_CUSTOMER, "20")
    assert of(store, tenant, "ana") == [("20", parent)]
    assert of(store, tenant, "ben") == [("50", None)], "its own one replaced it"
    with store.read() as sql:
        (ana,) = records.of_customer(sql, tenant=tenant, customer="ana")
        listed = spending.overview(sql, tenant=tenant, now=NOW)
    assert '"amount":"20"' in fed(store)[ana.id]
    assert sorted(one.budget.terms.customer for one in listed) == [ANY_CUSTOMER, "ben"]
    with pytest.raises(Conflict, match="is what customer 'ana' has of"), store.write() as write:
        changes.delete(write, tenant=tenant, budget_id=ana.id, actor="k")
    with store.write() as write:
        changes.delete(write, tenant=tenant, budget_id=parent, actor="k")
    assert of(store, tenant, "ana") == []
    assert fed(store)[ana.id] is None
    assert of(store, tenant, "ben") == [("50", None)]


def test_a_flood_of_customers_displaces_those_that_used_nothing_and_no_others(
    store: Store, tenant: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(customer_budgets, "MAX_DERIVED", 3)
    clock.now = NOW
    put(store, tenant, ANY_CUSTOMER)
    for name in ("ana", "ben", "eve"):
        derive(store, tenant, name)
    use(store, tenant, ("ana", "6"), ("ben", "1"))
    with pytest.raises(TooManyRequests) as refused:
        derive(store, tenant, "new")
    assert refused.value.retry_after_s
    assert refused.value.detail["customer"] == "new"
    clock.now += customer_budgets.LEAST_AGE_S + 1.0
    assert derive(store, tenant, "new") == 1
    assert [len(of(store, tenant, name)) for name in ("ana", "ben", "eve", "new")] == [1, 1, 0, 1]


def test_own_budgets_and_those_of_customers_are_counted_apart(
    store: Store, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_BUDGETS", 2)
    put(store, tenant, ANY_CUSTOMER)
    for n in range(5):
        derive(store, tenant, f"c-{n}")
    put(store, tenant, "c-1")
    with pytest.raises(Conflict, match="has 2 budgets"):
        put(store, tenant, "c-2")


def test_quotas_of_customers_are_set_by_their_tenant_alone_and_bounded(
    store: Store, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put_quotas(customer: str, **body: Any) -> dict[str, Any]:
        with store.write() as write:
            return quotas.put(write, tenant=tenant, customer=customer, body=body, actor="k")

    monkeypatch.setattr(quotas, "MAX_CUSTOMERS", 2)
    assert put_quotas(ANY_CUSTOMER, requests_per_s=5) == {"requests_per_s": 5}
    put_quotas("ana", concurrent=2)
    with pytest.raises(Conflict, match="clear some first"):
        put_quotas("ben", concurrent=2)
    for customer, body in (
        ("a b", {"concurrent": 2}),
        ("ana", {"instances": 1}),
        ("ana", {"x": 1}),
    ):
        with pytest.raises(InvalidInput):
            put_quotas(customer, **body)
    put_quotas("ana")
    with store.read() as sql:
        assert quotas.listing(sql, tenant) == [(ANY_CUSTOMER, {"requests_per_s": 5})]
        assert quotas.listing(sql, "t-2") == []
        rows = sql.execute(
            sa.select(tables.feed.c.key, tables.feed.c.value)
            .where(tables.feed.c.kind == "quota")
            .order_by(tables.feed.c.seq)
        ).all()
    fed = {row.key: row.value for row in rows}
    assert fed == {f"{tenant}/*": '{"requests_per_s":5}', f"{tenant}/ana": None}


def test_an_upgrade_keeps_budgets_and_their_alerts(url: str, clock: ManualClock) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(stores.__file__).parent / "migrations"))
    store = Store(url, clock=clock)
    with store.engine.begin() as sql:
        config.attributes["connection"] = sql
        command.upgrade(config, "0027")
    budget: dict[str, Any] = {"id": "b-1", "tenant": "t-1", "environment": "", "app": "shop"}
    budget |= {"function": "", "period": "day", "amount": "9", "currency": "USD", "hard": True}
    budget |= {"alerts": "[50]", "webhook": None, "sealed_secret": None}
    budget |= {"created_at": 1.0, "updated_at": 2.0}
    alert: dict[str, Any] = {"id": "al-1", "budget": "b-1", "tenant": "t-1", "period": "2026-11-21"}
    alert |= {"percent": 50, "spent": "5", "at": 3.0, "delivered_at": 4.0}
    alert |= {"next_attempt_at": None, "attempts": 1, "error": None}
    tenant = {"id": "t-1", "name": "acme", "created_at": 1.0}
    with store.engine.begin() as sql:
        for name, row in (("tenants", tenant), ("budgets", budget), ("budget_alerts", alert)):
            table = sa.table(name, *(sa.column(one) for one in row))
            sql.execute(sa.insert(table).values(**row))
    store.migrate()
    put(store, "t-1", "ana", app="shop", period="day")  # one of another reach now
    with store.write() as write:
        kept = records.get(write.sql, tenant="t-1", budget_id="b-1")
        assert (kept.terms.amount, kept.terms.hard, kept.terms.customer) == ("9", True, "")
        assert [one.id for one in budget_alerts.listing(write.sql, budgets=["b-1"])] == ["al-1"]
        changes.delete(write, tenant="t-1", budget_id="b-1", actor="k")
    store.close()
