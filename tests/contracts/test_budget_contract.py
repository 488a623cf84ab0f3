"""Budgets and alerts: the same on SQLite and on PostgreSQL."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from pilotlight.controller.billing import budget_alerts, ledger
from pilotlight.controller.billing.budget_definition import parse_definition
from pilotlight.controller.billing.budgets import changes, records, spending
from pilotlight.controller.billing.budgets.records import Budget
from pilotlight.controller.database import delivery_retry, tables
from pilotlight.controller.database.store import Store
from pilotlight.controller.identity import tenants
from pilotlight.core.crypto import PlatformKey
from pilotlight.protocol import BudgetState
from tests.functions.controller.parts import at_once, usage


@pytest.fixture
def budget(store: Store, tmp_path: Path) -> Budget:
    key = PlatformKey.load_or_create(tmp_path / "platform.key")
    terms = parse_definition(
        amount="4000000.000000000001",
        currency="USD",
        currencies={"USD"},
        app="search",
        webhook="https://hooks.example/",
    )
    with store.write() as write:
        tenant = tenants.create(write, name="acme", uid_base=None, actor="platform")
        return changes.put(write, key=key, tenant=tenant.id, terms=terms, actor="k-1").budget


def spend(store: Store, budget: Budget, *costs: str, first: int = 0) -> dict[str, BudgetState]:
    records = [
        usage(f"req-{n}/1", tenant=budget.tenant, cost=cost, app="search")
        for n, cost in enumerate(costs, first)
    ]
    with store.write() as write:
        added = ledger.add(write, records)
        return spending.after_usage(write, new=added.spent, batch=added.batch)


def test_large_sums_are_exact_and_each_threshold_is_noted_once(
    store: Store, budget: Budget
) -> None:
    spend(store, budget, "1999999.999999999999", "0.000000000001")
    assert spend(store, budget, "1999999.999999999999", "0.000000000002", first=2) == {
        budget.id: BudgetState(
            period="2027-01", spent="4000000.000000000001", batch="2000000.000000000001"
        )
    }
    spend(store, budget, "1999999.999999999999", "0.000000000002", first=2)
    with store.read() as sql:
        assert sorted(
            alert.percent for alert in budget_alerts.listing(sql, budgets=[budget.id])
        ) == [
            50,
            80,
            100,
        ]
        assert spending.states(sql, now=1_800_000_000.0)[budget.id].spent == "4000000.000000000001"
        assert spending.shares(sql, now=1_800_000_000.0) == {(budget.tenant, budget.id): 1.0}


def test_an_alert_is_claimed_by_one_of_many(store: Store, budget: Budget) -> None:
    spend(store, budget, "4000000.000000000001")

    def claim(store: Store) -> list[str]:
        with store.write() as write:
            due = budget_alerts.due(write, limit=2)
            found = delivery_retry.claim(write, tables.budget_alerts, due)
            return [alert.id for alert in found]

    claimed = list(itertools.chain(*at_once(claim, [store] * 4)))
    assert len(claimed) == len(set(claimed)) == 3


def test_a_budget_goes_with_its_alerts(store: Store, budget: Budget) -> None:
    spend(store, budget, "4000000.000000000001")
    with store.write() as write:
        changes.delete(write, tenant=budget.tenant, budget_id=budget.id, actor="k-1")
    with store.read() as sql:
        assert (records.listing(sql), budget_alerts.listing(sql, budgets=[budget.id])) == ([], [])
