"""Invoices: what a tenant owes for a month, computed live as a draft, frozen once issued.

An invoice sums the records of its `month`. Issuing it closes the month (UTC) for that tenant and
currency: the ledger assigns later records to the first open month, so the sum of all invoices
equals the sum of all records."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.billing import ledger, price_lists
from pilotlight.controller.billing.credits import consumption
from pilotlight.controller.billing.ledger_totals import Total, money_sums, picos_of, totals
from pilotlight.controller.billing.usage_aggregation import DAY_S, month_of_day, next_month
from pilotlight.controller.database import audit_trail, tables
from pilotlight.controller.database.store import Write
from pilotlight.errors import Conflict, InvalidInput, NotFound
from pilotlight.spec.pricing import parse_picos, picos_text
from pilotlight.spec.record_json import canonical_json

DRAFT, ISSUED, STATEMENT = "draft", "issued", "statement"
COLUMNS = (
    "invoice",
    "month",
    "environment",
    "app",
    "function",
    "kind",
    "price_version",
    "records",
    "billed_ms",
    "tokens_in",
    "tokens_out",
    "cost",
    "currency",
    "corrects",
    "note",
)
"""Columns of an invoice as CSV: one row per line, one per correction; the sum of `cost` is the
invoice's total."""
_LINES = ("environment", "app", "function", "kind", "price_version")


def listing(sql: sa.Connection, *, tenant: str) -> list[dict[str, Any]]:
    """Return a tenant's invoices, newest month first: the issued ones, and a draft for every open
    month with records."""
    table = tables.invoices
    columns = (table.c.id, table.c.month, table.c.currency, table.c.total, table.c.issued_at)
    issued = [
        {**row, "status": ISSUED}
        for row in sql.execute(sa.select(*columns).where(table.c.tenant == tenant)).mappings()
    ]
    closed = {(row["month"], row["currency"]) for row in issued}
    days = tables.usage_days
    sums = (
        sa.select(days.c.month, days.c.currency, *money_sums(days))
        .where(days.c.tenant == tenant)
        .group_by(days.c.month, days.c.currency)
    )
    drafts = [
        {
            "id": None,
            "month": month,
            "currency": currency,
            "total": picos_text(picos_of(high, low)),
            "issued_at": None,
            "status": DRAFT,
        }
        for month, currency, high, low in sql.execute(sums)
        if (month, currency) not in closed
    ]
    return sorted(issued + drafts, key=lambda row: (row["month"], row["currency"]), reverse=True)


def show(
    sql: sa.Connection, *, tenant: str, which: str, currency: str | None = None, now: float
) -> dict[str, Any]:
    """Return an invoice by its id or month (`2026-11`): the frozen document if issued, else a
    draft.

    Raises NotFound if the tenant has no such invoice, InvalidInput when the month has several
    currencies and none is named."""
    table = tables.invoices
    by_id = sa.select(table.c.document).where(table.c.tenant == tenant, table.c.id == which)
    if (document := sql.execute(by_id).scalar_one_or_none()) is not None:
        return dict(json.loads(document))
    months = [
        row
        for row in listing(sql, tenant=tenant)
        if row["month"] == which and currency in (None, row["currency"])
    ]
    if not months:
        raise NotFound(
            f"there is no invoice {which}",
            hint="`pilotlight billing invoice list` shows all invoices.",
        )
    if len(months) > 1:
        raise InvalidInput(
            f"{which} has invoices in {', '.join(row['currency'] for row in months)}: specify the "
            f"currency",
            parameter="currency",
        )
    (found,) = months
    if found["id"] is not None:
        return show(sql, tenant=tenant, which=found["id"], now=now)
    return _document(sql, tenant=tenant, month=which, currency=found["currency"], now=now)


def statement(
    sql: sa.Connection,
    *,
    tenant: str,
    which: str,
    currency: str | None = None,
    part: Mapping[str, str],
    now: float,
) -> dict[str, Any]:
    """Return the part of an invoice that is of one key or customer, named in `part`, computed live.
    That of a customer with prepaid credit says in `credit` what it used of it.
    Statements of an issued invoice do not change. Raises as `show`."""
    invoice = show(sql, tenant=tenant, which=which, currency=currency, now=now)
    document = _document(
        sql,
        tenant=tenant,
        month=invoice["month"],
        currency=invoice["currency"],
        now=now,
        part=part,
    )
    credit = _credit(sql, tenant=tenant, document=document, part=part)
    return {**document, **part, **credit, "id": invoice["id"], "status": STATEMENT}


def issue(
    write: Write, *, tenant: str, month: str, currency: str, actor: str, request: str = ""
) -> dict[str, Any]:
    """Freeze the invoice of a past month; invoice numbers have no gaps. Raises InvalidInput,
    NotFound, Conflict (issued before)."""
    if not 0 <= write.now < 1e11 or write.now < month_ends_at(month):
        raise InvalidInput(
            f"month {month} is not over yet (UTC): its draft is `pilotlight billing invoice show "
            f"{month}`",
            parameter="month",
        )
    table = tables.invoices
    same = (table.c.tenant == tenant) & (table.c.month == month) & (table.c.currency == currency)
    if (
        before := write.sql.execute(sa.select(table.c.id).where(same)).scalar_one_or_none()
    ) is not None:
        raise Conflict(f"the invoice of {month} was already issued as {before}")
    document = _document(write.sql, tenant=tenant, month=month, currency=currency, now=write.now)
    if not document["lines"]:
        raise NotFound(f"there is no usage in {currency} to invoice for {month}")
    number = int(write.sql.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()) + 1
    document |= {"id": f"inv-{number:06}", "status": ISSUED, "issued_at": write.now}
    row = {name: document[name] for name in ("id", "month", "currency", "total", "issued_at")}
    write.sql.execute(
        sa.insert(table).values(**row, tenant=tenant, document=canonical_json(document).decode())
    )
    summary = {name: document[name] for name in ("month", "currency", "total")}
    audit_trail.record(
        write,
        tenant=tenant,
        actor=actor,
        action="invoice.issue",
        subject=document["id"],
        after=summary,
        request=request,
    )
    return document


def due(
    sql: sa.Connection, *, now: float, after_days: int, limit: int
) -> list[tuple[str, str, str]]:
    """Return (tenant, month, currency) of the invoices to issue, oldest first: those whose month
    ended at least `after_days` ago."""
    days, table = tables.usage_days, tables.invoices
    issued = sa.exists().where(
        table.c.tenant == days.c.tenant,
        table.c.month == days.c.month,
        table.c.currency == days.c.currency,
    )
    # only months before this one ended long enough ago
    last = month_of_day(int(now - after_days * DAY_S) // DAY_S)
    columns = (days.c.tenant, days.c.month, days.c.currency)
    known = (
        sa.select(*columns).distinct().join(tables.tenants, tables.tenants.c.id == days.c.tenant)
    )
    query = (
        known.where(days.c.month < last, ~issued).order_by(days.c.month, days.c.tenant).limit(limit)
    )
    return [
        (str(tenant), str(month), str(currency)) for tenant, month, currency in sql.execute(query)
    ]


def open_in(sql: sa.Connection, *, month: str, tenant: str | None) -> list[tuple[str, str]]:
    """Return (tenant, currency) of a month's invoices that are not issued; `tenant` None = all."""
    days, table = tables.usage_days, tables.invoices
    issued = sa.exists().where(
        table.c.tenant == days.c.tenant,
        table.c.month == days.c.month,
        table.c.currency == days.c.currency,
    )
    known = (
        sa.select(days.c.tenant, days.c.currency)
        .distinct()
        .join(tables.tenants, tables.tenants.c.id == days.c.tenant)
    )
    query = known.where(days.c.month == month, ~issued)
    if tenant is not None:
        query = query.where(days.c.tenant == tenant)
    return [
        (str(owner), str(currency))
        for owner, currency in sql.execute(query.order_by(days.c.tenant, days.c.currency))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class InvoiceDifference:
    """An issued invoice whose total is not the sum of its records; totals are decimals."""

    id: str
    tenant: str
    month: str
    currency: str
    expected: str
    found: str


def verify_totals(sql: sa.Connection, *, tenant: str | None = None) -> list[InvoiceDifference]:
    """Compare the totals of issued invoices (of a tenant; None = of all) with the sums of their
    records; [] = they are equal."""
    days, table = tables.usage_days, tables.invoices
    keys = (days.c.tenant, days.c.month, days.c.currency)
    sums = {
        tuple(key): picos_of(high, low)
        for *key, high, low in sql.execute(sa.select(*keys, *money_sums(days)).group_by(*keys))
    }
    columns = (table.c.id, table.c.tenant, table.c.month, table.c.currency, table.c.total)
    query = sa.select(*columns, table.c.document).order_by(table.c.id)
    if tenant is not None:
        query = query.where(table.c.tenant == tenant)
    out = []
    for row in sql.execute(query):
        expected = picos_text(sums.get((row.tenant, row.month, row.currency), 0))
        for found in (row.total, json.loads(row.document)["total"]):
            if found != expected:
                named = {name: getattr(row, name) for name in ("id", "tenant", "month", "currency")}
                out.append(InvoiceDifference(**named, expected=expected, found=found))
                break
    return out


def month_ends_at(month: str) -> float:
    """Return the end of a month such as "2026-11" (UTC), in seconds since the epoch. Raises
    InvalidInput."""
    try:
        dt.date.fromisoformat(f"{month}-01")
        return (
            dt.datetime.fromisoformat(f"{next_month(month)}-01").replace(tzinfo=dt.UTC).timestamp()
        )
    except ValueError as e:
        raise InvalidInput(f"month = {month!r}: write it like 2026-11", parameter="month") from e


def rows(document: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Yield an invoice's rows for CSV, by COLUMNS."""
    common = {
        "invoice": document["id"] or DRAFT,
        "month": document["month"],
        "currency": document["currency"],
    }
    for line in document["lines"]:
        if line["kind"] != ledger.ADJUSTMENT:
            yield {**common, **line}
    for correction in document["corrections"]:
        yield {
            **common,
            **correction,
            "kind": ledger.ADJUSTMENT,
            "records": 1,
            "billed_ms": 0,
            "tokens_in": 0,
            "tokens_out": 0,
        }


def _document(
    sql: sa.Connection,
    *,
    tenant: str,
    month: str,
    currency: str,
    now: float,
    part: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    where = {"month": month, "currency": currency, **(part or {})}
    lines = totals(sql, tenant=tenant, groups=_LINES, since=None, until=None, where=where)
    used = {str(line.group["price_version"]) for line in lines}
    name = sql.execute(
        sa.select(tables.tenants.c.name).where(tables.tenants.c.id == tenant)
    ).scalar_one_or_none()
    return {
        "id": None,
        "status": DRAFT,
        "issued_at": None,
        "as_of": now,
        "tenant": {"id": tenant, "name": name or ""},
        "month": month,
        "currency": currency,
        "lines": [_line(line) for line in lines],
        "corrections": _corrections(sql, tenant=tenant, where=where),
        "late": _late(sql, tenant=tenant, where=where),
        "prices": [rates for rates in price_lists.listing(sql) if rates["version"] in used],
        "total": picos_text(sum(line.picos for line in lines)),
    }


def _credit(
    sql: sa.Connection, *, tenant: str, document: Mapping[str, Any], part: Mapping[str, str]
) -> dict[str, Any]:
    """Return `credit` of a customer's statement: what it used of prepaid credit, and what is due
    beyond that; {} if it had none, or for a part of its calls."""
    if part.keys() != {"customer"}:
        return {}
    month, currency = document["month"], document["currency"]
    used = consumption.used_in_month(
        sql, tenant=tenant, customer=part["customer"], currency=currency, month=month
    )
    if used is None:
        return {}
    total = parse_picos(document["total"])
    return {"credit": {"used": picos_text(used), "due": picos_text(total - used)}}


def _line(total: Total) -> dict[str, Any]:
    sums = {
        "billed_ms": f"{Decimal(total.sums['billed_ns']) / 10**6:f}",
        **{name: total.sums[name] for name in ("tokens_in", "tokens_out")},
    }
    return {**total.group, "records": total.records, **sums, "cost": picos_text(total.picos)}


def _corrections(
    sql: sa.Connection, *, tenant: str, where: Mapping[str, str]
) -> list[dict[str, Any]]:
    # Corrections are few and a month has many records: the rollup shows which days have some.
    where = {**where, "kind": ledger.ADJUSTMENT}
    out: list[dict[str, Any]] = []
    for total in totals(sql, tenant=tenant, groups=("day",), since=None, until=None, where=where):
        out += _corrections_of(sql, int(total.group["day"]), {"tenant": tenant, **where})
    return out


def _corrections_of(sql: sa.Connection, day: int, where: Mapping[str, str]) -> list[dict[str, Any]]:
    c = tables.usage.c
    columns = (
        c.id,
        c.environment,
        c.app,
        c.function,
        c.price_version,
        c.corrects,
        c.note,
        c.started_at,
        c.cost_picos,
    )
    begin = float(day * DAY_S)
    within = [
        c.started_at >= begin,
        c.started_at < begin + DAY_S,
        *(c[name] == value for name, value in where.items()),
    ]
    found = sql.execute(sa.select(*columns).where(*within).order_by(c.started_at, c.id)).mappings()
    return [
        {
            **{k: v for k, v in row.items() if k != "cost_picos"},
            "cost": picos_text(row["cost_picos"]),
        }
        for row in found
    ]


def _late(sql: sa.Connection, *, tenant: str, where: Mapping[str, str]) -> dict[str, str]:
    """Return the part of the total per earlier month: usage that arrived after that month's invoice
    was issued."""
    out: dict[str, int] = {}
    for total in totals(sql, tenant=tenant, groups=("day",), since=None, until=None, where=where):
        used = month_of_day(int(total.group["day"]))
        if used != where["month"]:
            out[used] = out.get(used, 0) + total.picos
    return {used: picos_text(picos) for used, picos in sorted(out.items())}
