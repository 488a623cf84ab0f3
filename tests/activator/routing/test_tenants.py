"""What the feed tells of tenants, plans, prices, quotas and budgets, and how it is refused when it
makes no sense."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from activator.access.grants import body_bytes_of, queue_bounds_of
from activator.fairness.queue_priority import QueueBound
from activator.quotas.rules import Rule, counted
from activator.routing.route_table import RouteTable
from activator.routing.tenants import Tenants, priority_of
from pilotlight.protocol import BudgetRecord, FeedChange
from pilotlight.spec.identifiers import Priority
from pilotlight.spec.pricing import Rates, rate_per_s
from pilotlight.spec.quotas import BUILT_IN_PLANS, UNLIMITED, Plan, Quotas
from tests.activator.routing.test_route_table import address, key_change
from tests.fakes.routes import TENANT, TEST_KEY, change, empty_table, route_of, spec_of

NAME = f"{TENANT}/main/shop/hello"


def told(table: RouteTable, kind: str, key: str, value: Any) -> bool:
    return table.apply(FeedChange(seq=table.version + 1, kind=kind, key=key, value=value))


def tenant(
    table: RouteTable,
    plan: dict[str, Any] | None = None,
    *,
    name: str = "acme",
    id: str = TENANT,
    suspended: bool = False,
) -> bool:
    return told(
        table,
        "tenant",
        id,
        {"id": id, "name": name, "uid": None, "plan": plan or {}, "suspended": suspended},
    )


def test_a_tenants_plan_is_what_the_feed_says_and_unlimited_where_it_says_nothing() -> None:
    table = empty_table()
    assert table.plan_of("t-unknown") is UNLIMITED
    tenant(table, BUILT_IN_PLANS["free"].to_json())
    assert table.plan_of(TENANT) == BUILT_IN_PLANS["free"]
    tenant(table)
    assert table.plan_of(TENANT) is UNLIMITED


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param({"requests_per_s": -1}, id="negative"),
        pytest.param({"concurrent": 10**9}, id="huge"),
        pytest.param({"speed": 5}, id="unknown"),
        pytest.param({"priority": "urgent"}, id="no such priority"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused_and_the_last_good_one_stays(
    plan: dict[str, Any],
) -> None:
    table = empty_table()
    tenant(table, {"requests_per_s": 5})
    assert not tenant(table, plan)
    assert (table.plan_of(TENANT).requests_per_s, table.refused) == (5, 1)


@pytest.mark.parametrize("value", [{"requests_per_s": 0}, {"speed": 1}, {"burst": 5}, [], "5"])
def test_quotas_of_a_function_that_make_no_sense_are_refused_too(value: Any) -> None:
    table = empty_table()
    told(table, "quota", NAME, {"concurrent": 2})
    assert not told(table, "quota", NAME, value)
    assert table.quotas_of(NAME) == Quotas(concurrent=2)
    told(table, "quota", NAME, None)
    assert table.quotas_of(NAME) == Quotas()


def test_a_key_with_quotas_that_make_no_sense_is_refused_and_the_old_one_stays_valid() -> None:
    table = empty_table()
    table.apply(key_change(1, "pl_a"))
    record = {**key_change(2, "pl_b").value, "quotas": {"concurrent": -1}}
    assert not told(table, "key", "k-1", record)
    assert table.authenticate(b"Bearer pl_a", 0.0).key_id == "k-1"


def test_a_tenant_is_found_by_its_name_also_after_it_was_renamed() -> None:
    table = empty_table()
    tenant(table, name="acme")
    table.apply(key_change(2, "pl_a"))
    assert table.authenticate(b"Bearer pl_a", 0.0).tenant_name == "acme"
    tenant(table, name="apex")

    assert (table.tenants.named("acme"), table.tenants.named("apex")) == (None, TENANT)
    assert table.authenticate(b"Bearer pl_a", 0.0).tenant_name == "apex"
    assert (table.tenant_name(TENANT), table.tenant_name("t-2"), dict(table.tenants.names())) == (
        "apex",
        "",
        {TENANT: "apex"},
    )
    told(table, "tenant", TENANT, None)
    assert table.tenants.named("apex") is None


def test_a_name_that_passed_on_to_another_tenant_is_the_new_ones() -> None:
    tenants = Tenants()
    tenants.apply("t-1", {"id": "t-1", "name": "acme", "uid": None, "suspended": True})
    tenants.apply("t-2", {"id": "t-2", "name": "acme", "uid": None})
    tenants.apply("t-1", None)
    assert tenants.named("acme") == "t-2"
    assert (tenants.is_suspended("t-1"), tenants.is_suspended("t-2")) == (False, False)
    assert repr(tenants) == "<Tenants 1, 0 suspended>"


def test_reserved_memory_is_listed_by_tenant() -> None:
    table = empty_table()
    tenant(table, {"isolation": "reserved", "reserved_memory_bytes": 1 << 30})
    tenant(table, {}, id="t-2", name="beta")
    assert dict(table.reserved()) == {TENANT: 1 << 30}


@pytest.fixture(name="priced")
def _priced() -> RouteTable:
    """A table with two price lists and a deployed function."""
    lists = {
        version: Rates(version=version, cpu_core_s=Decimal(price))
        for version, price in (("own", "1"), ("cheap", "0.5"))
    }
    table = RouteTable(lists, TEST_KEY.secrets)
    table.apply(change(1, route_of(spec_of())))
    return table


def test_a_function_is_priced_by_its_tenants_plan_and_anew_when_that_changes(
    priced: RouteTable,
) -> None:
    changed: list[str] = []
    priced.on_function = lambda *told: changed.append(told[0])
    assert priced.target(address()).rates.version == "own"
    tenant(priced, {"prices": "cheap"})
    assert priced.target(address()).rates.version == "cheap"
    target = priced.target(address())
    assert rate_per_s(target.footprint, target.rates) < Decimal(1)
    tenant(priced, {"prices": "cheap", "concurrent": 3})  # the same prices: nothing is made anew
    tenant(priced)

    assert priced.target(address()).rates.version == "own"
    assert changed == [NAME, NAME]


def test_prices_that_there_are_not_are_the_platforms_own_and_said_once(
    priced: RouteTable, caplog: pytest.LogCaptureFixture
) -> None:
    tenant(priced, {"prices": "golden"})
    for _ in range(3):
        assert priced.rates_of(TENANT).version == "own"
    assert [r.message.partition(" prices=")[2] for r in caplog.records] == [
        f"golden tenant={TENANT}"
    ]


def test_who_keeps_budgets_is_told_each_and_that_they_are_gone_when_the_feed_begins_anew() -> None:
    table = empty_table()
    known: dict[str, BudgetRecord | None] = {}
    table.on_budget = known.__setitem__
    record: dict[str, Any] = {
        "id": "b-1",
        "tenant": TENANT,
        "period": "day",
        "amount": "5",
        "currency": "USD",
    }
    record |= {"environment": "", "app": "", "function": ""}
    assert told(table, "budget", "b-1", record)
    assert known == {"b-1": BudgetRecord(**record)}
    assert not told(table, "budget", "b-2", {"id": "b-2"})

    table.clear()
    assert known == {"b-1": None}


def test_the_smallest_bound_on_a_body_counts_and_every_bound_on_waiting_calls() -> None:
    rules = (
        Rule(of="owner", subject="t-1", quotas=Quotas(body_bytes=50, queued=9), tenant="t-1"),
        Rule(of="key", subject="k-1", quotas=Quotas(body_bytes=20, instances=3), tenant="t-2"),
        Rule(of="function", subject="f", quotas=Quotas(concurrent=1), tenant="t-1"),
    )
    assert (body_bytes_of(rules, 100), body_bytes_of(rules, 10), body_bytes_of((), None)) == (
        20,
        10,
        None,
    )
    assert queue_bounds_of(rules) == (QueueBound(of="tenant", subject="t-1", limit=9),)
    assert [rule.id for rule in counted(rules)] == ["function:f"]
    assert rules[0].id == "tenant:t-1"


def test_a_priority_is_what_is_asked_or_declared_within_every_plan() -> None:
    batch, realtime = Plan(priority=Priority.BATCH), Plan(priority=Priority.REALTIME)
    assert priority_of(None, None, realtime) is Priority.STANDARD
    assert priority_of(None, Priority.REALTIME, realtime) is Priority.REALTIME
    assert priority_of(Priority.BATCH, Priority.REALTIME, realtime) is Priority.BATCH
    assert priority_of(Priority.REALTIME, None, realtime, batch) is Priority.BATCH
