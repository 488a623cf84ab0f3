"""Spending by scope: sums of the ledger's daily rollups, or of a batch of records, by the scopes of
budgets.

A scope (reach) consists of a tenant, a currency, and an environment, an app, a function and a
customer, each of which may be "" for all of them. Sums of all records and those by customer are
apart: a row belongs to up to six scopes; only requested ones are summed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

import sqlalchemy as sa

from pilotlight.controller.billing.budget_periods import Period
from pilotlight.controller.billing.ledger_totals import money_sums, picos_of
from pilotlight.controller.billing.usage_aggregation import SpendKey
from pilotlight.controller.database import bulk, tables

SpendScope = tuple[str, str, str, str, str, str]
"""(tenant, environment, app, function, currency, customer)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpendByScope:
    """Picounits by scope and day. A missing scope has no records, which differs from records that
    cost 0."""

    by_reach: Mapping[SpendScope, Mapping[int, int]] = field(default_factory=dict)

    def days(self, reach: SpendScope) -> Mapping[int, int]:
        """Return the spending of each day that has records."""
        return self.by_reach.get(reach, {})

    def within(self, reach: SpendScope, period: Period) -> int:
        """Return the spending in a period."""
        return sum(
            picos
            for day, picos in self.days(reach).items()
            if period.first_day <= day < period.end_day
        )


def spend_of_batch(costs: Mapping[SpendKey, int], reaches: Collection[SpendScope]) -> SpendByScope:
    """Return the spending of a batch of records."""
    rows = (
        ((tenant, environment, app, function, currency, customer), day, picos)
        for (tenant, environment, app, function, day, _, currency, customer), picos in costs.items()
    )
    return _summed(rows, reaches)


def read_spend(
    sql: sa.Connection, reaches: Collection[SpendScope], *, first_day: int, end_day: int
) -> SpendByScope:
    """Return the spending from `first_day` until before `end_day`, from the daily rollups."""
    tenants = sorted({reach[0] for reach in reaches if not reach[5]})
    # One currency at a time: then the grouping has the order of the table's key, so no sort is
    # needed.
    rows = [
        _rows(sql, tenants, currency, first_day, end_day)
        for currency in {reach[4] for reach in reaches if not reach[5]}
    ]
    customers: dict[tuple[str, str], set[str]] = {}
    for tenant, _, _, _, currency, customer in reaches:
        if customer:
            customers.setdefault((tenant, currency), set()).add(customer)
    rows += [
        _customer_rows(sql, of, sorted(found), first_day, end_day)
        for of, found in customers.items()
    ]
    return _summed(chain.from_iterable(rows), reaches)


def _rows(
    sql: sa.Connection, tenants: list[str], currency: str, first_day: int, end_day: int
) -> Iterator[tuple[SpendScope, int, int]]:
    table = tables.usage_days
    within = (table.c.day >= first_day, table.c.day < end_day, table.c.currency == currency)
    for tenant, day, inside, picos in _daily(sql, table.c.tenant, tenants, *within):
        yield (tenant, *inside, currency, ""), day, picos


def _customer_rows(
    sql: sa.Connection,
    of: tuple[str, str],
    customers: list[str],
    first_day: int,
    end_day: int,
) -> Iterator[tuple[SpendScope, int, int]]:
    (tenant, currency), table = of, tables.customer_days
    within = (
        table.c.tenant == tenant,
        table.c.day >= first_day,
        table.c.day < end_day,
        table.c.currency == currency,
    )
    for customer, day, inside, picos in _daily(sql, table.c.customer, customers, *within):
        yield (tenant, *inside, currency, customer), day, picos


def _daily(
    sql: sa.Connection, owner: sa.Column[str], owners: list[str], *within: sa.ColumnElement[bool]
) -> Iterator[tuple[str, int, tuple[str, str, str], int]]:
    """Yield picounits by owner, day, and (environment, app, function)."""
    table = owner.table
    parts = (owner, table.c.day, table.c.environment, table.c.app, table.c.function)
    query = sa.select(*parts, *money_sums(table)).where(*within).group_by(*parts)
    for some in bulk.parts(owners):
        for one, day, *inside, high, low in sql.execute(query.where(owner.in_(some))):
            environment, app, function = inside
            yield one, day, (environment, app, function), picos_of(high, low)


def _summed(
    rows: Iterable[tuple[SpendScope, int, int]], reaches: Collection[SpendScope]
) -> SpendByScope:
    wanted = frozenset(reaches)
    found: dict[SpendScope, dict[int, int]] = {}
    for reach, day, picos in rows:
        for wider in _covering(reach):
            if wider in wanted:
                days = found.setdefault(wider, {})
                days[day] = days.get(day, 0) + picos
    return SpendByScope(by_reach=found)


def _covering(reach: SpendScope) -> frozenset[SpendScope]:
    """Return every scope that covers the record. A set, because parts of a STORAGE record may be ""
    already."""
    tenant, environment, app, function, currency, customer = reach
    return frozenset(
        (tenant, some, *inside, currency, customer)
        for some in (environment, "")
        for inside in ((app, function), (app, ""), ("", ""))
    )
