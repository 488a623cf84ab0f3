"""What usage draws from prepaid credit: in the transaction in which its records are added to the
ledger, so that each record counts once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.billing import rollups
from pilotlight.controller.billing.credits import accounts
from pilotlight.controller.billing.credits.accounts import REFUND, AccountKey, CreditAccount
from pilotlight.controller.billing.ledger import LedgerInsert, LedgerRow
from pilotlight.controller.billing.ledger_totals import HALF, money_sums, picos_of
from pilotlight.controller.billing.usage_aggregation import AT, COLUMNS, SpendKey
from pilotlight.controller.database import audit_trail, bulk, tables
from pilotlight.controller.database.store import Write
from pilotlight.protocol import BudgetState

MAX_USES = 10_000
"""Most rows of one month's uses."""
_key = itemgetter(*(AT[name] for name in ("tenant", "customer", "currency")))
_place = itemgetter(*(AT[name] for name in ("month", "day", "environment", "app", "function")))
_CUSTOMER, _STARTED_AT, _PICOS = (AT[name] for name in ("customer", "started_at", "cost_picos"))
_CORRECTS, _NOTE = AT["corrects"], AT["note"]
_PREPAID = "SELECT DISTINCT tenant FROM credit_accounts WHERE closed_at IS NULL AND tenant {in}"
_U = tables.credit_uses.c


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditUse:
    """What calls of one function on one day used, in picounits; negative where corrections
    credited more."""

    currency: str
    day: int
    environment: str
    app: str
    function: str
    picos: int


def consume(write: Write, added: LedgerInsert) -> dict[str, BudgetState]:
    """Charge the new records of a batch to the credit of their customers. Returns the state of
    each account that some records of the batch, also repeated ones, belong to."""
    found = _accounts_of(write.sql, [place for place in added.batch if place.customer])
    if not found:
        return {}
    fresh = _by_account(found, added.fresh)
    for key, rows in fresh.items():
        charge(write, found[key], rows)
        accounts.save(write, found[key])
    sent = {
        key: sum(max(0, row[_PICOS]) for row in rows)
        for key, rows in _by_account(found, added.rows).items()
    }
    return {found[key].id: found[key].state(write.now, batch=picos) for key, picos in sent.items()}


def _accounts_of(sql: sa.Connection, named: Sequence[SpendKey]) -> dict[AccountKey, CreditAccount]:
    """Return the open accounts of the customers of a batch."""
    prepaid = bulk.select_in(sql, _PREPAID, {place.tenant for place in named}) if named else []
    tenants = {tenant for (tenant,) in prepaid}
    if not tenants:
        return {}
    customers = {place.customer for place in named if place.tenant in tenants}
    found = accounts.open_accounts(sql, tenants=tenants, customers=customers)
    return {account.key: account for account in found}


def charge(write: Write, account: CreditAccount, rows: Iterable[LedgerRow]) -> None:
    """Charge records to an account, in the order in which they began. The caller stores it."""
    uses: defaultdict[tuple[Any, ...], int] = defaultdict(int)
    refunds = []
    for row in sorted(rows, key=itemgetter(_STARTED_AT)):
        uses[_place(row)] += row[_PICOS]
        if row[_PICOS] < 0:
            refunds.append(row)
        else:
            account.draw(row[_PICOS], row[_STARTED_AT])
    rollups.upsert_sums(
        write,
        tables.credit_uses,
        [(account.id, *place, *divmod(picos, HALF)) for place, picos in uses.items()],
    )
    for row in refunds:
        note = f"correction of {row[_CORRECTS]}: {row[_NOTE]}"
        accounts.append(
            write, account, kind=REFUND, amount=-row[_PICOS], actor=audit_trail.PLATFORM, note=note
        )
    if refunds:
        accounts.publish(write, account)


def catch_up(write: Write, account: CreditAccount) -> None:
    """Charge the records of its customer that an account which is new should pay, and that were in
    the ledger before it. The caller stores it."""
    c = tables.usage.c
    mine = (c.tenant == account.tenant) & (c.customer == account.customer)
    query = sa.select(*(c[name] for name in COLUMNS)).where(
        mine, c.currency == account.currency, c.started_at >= account.opened_at
    )
    charge(write, account, [tuple(row) for row in write.sql.execute(query)])


def uses(sql: sa.Connection, *, tenant: str, customer: str, month: str) -> list[CreditUse]:
    """Return what used a customer's credit, of the invoice of a month: the first MAX_USES days and
    functions, the newest first."""
    names = ("day", "environment", "app", "function")
    parts = (tables.credit_accounts.c.currency, *(_U[name] for name in names))
    query: sa.Select[Any] = (
        sa.select(*parts, sa.func.sum(_U.high), sa.func.sum(_U.low))
        .join(tables.credit_accounts, tables.credit_accounts.c.id == _U.account)
        .where(*_of(tenant, customer), _U.month == month)
        .group_by(*parts)
        .order_by(_U.day.desc(), *parts)
        .limit(MAX_USES)
    )
    return [
        CreditUse(
            currency=currency,
            day=day,
            environment=environment,
            app=app,
            function=function,
            picos=picos_of(high, low),
        )
        for currency, day, environment, app, function, high, low in sql.execute(query)
    ]


def used_in_month(
    sql: sa.Connection, *, tenant: str, customer: str, currency: str, month: str
) -> int | None:
    """Return what a customer used of its credit on the invoice of a month, in picounits; None if
    it had none."""
    query = (
        sa.select(*money_sums(tables.credit_uses))
        .join(tables.credit_accounts, tables.credit_accounts.c.id == _U.account)
        .where(*_of(tenant, customer), tables.credit_accounts.c.currency == currency)
        .where(_U.month == month)
    )
    high, low = sql.execute(query).one()
    return None if high is None else picos_of(high, low)


def _of(tenant: str, customer: str) -> tuple[sa.ColumnElement[bool], ...]:
    c = tables.credit_accounts.c
    return c.tenant == tenant, c.customer == customer


def _by_account(
    found: Mapping[AccountKey, CreditAccount], rows: Iterable[LedgerRow]
) -> dict[AccountKey, list[LedgerRow]]:
    """Return the rows that belong to each of these accounts."""
    out: defaultdict[AccountKey, list[LedgerRow]] = defaultdict(list)
    for row in rows:
        if row[_CUSTOMER]:
            account = found.get(_key(row))
            if account is not None and row[_STARTED_AT] >= account.opened_at:
                out[account.key].append(row)
    return dict(out)
