"""What was called, and what it cost."""

from __future__ import annotations

import csv
import datetime as dt
import io
from collections.abc import Iterable
from decimal import Decimal
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response

from pilotlight.controller import bills, calls
from pilotlight.controller.api import models
from pilotlight.controller.bills import Line
from pilotlight.controller.context import Ctx, Deployer, Invoker
from pilotlight.errors import Forbidden, InvalidInput, NotFound

Grouping = Literal["function", "app", "environment", "revision", "key", "day"]

router = APIRouter(prefix="/v1", tags=["books"])


@router.get("/calls/{call}")
def get_call(context: Ctx, caller: Invoker, call: str) -> dict[str, Any]:
    """A call: its record (`pilotlight.protocol.CallRecord`) and its `attempts` (usage records)."""
    with context.store.read() as sql:
        found = calls.get(sql, tenant=caller.tenant, call=call)
    if caller.bound_environment not in (None, found["environment"]):
        raise NotFound(f"there is no call {call}")
    return found


@router.get("/billing/report", response_model=models.Bill)
def billing_report(
    *,
    context: Ctx,
    caller: Deployer,
    since: Annotated[str | None, Query(description="seconds since the epoch, or ISO 8601 (UTC where it names no zone)")] = None,
    until: Annotated[str | None, Query(description="the same; not included")] = None,
    by: Grouping = "function",
    environment: str | None = None,
    format: Literal["json", "csv"] = "json",
) -> models.Bill | Response:
    """What was used and what it costs, exact to the last digit."""
    if caller.bound_environment not in (None, environment or caller.bound_environment):
        raise Forbidden(f"key {caller.key} is bound to environment {caller.bound_environment!r}")
    begin, end = _time("since", since), _time("until", until)
    chosen = environment or caller.bound_environment
    with context.store.read() as sql:
        lines = bills.report(sql, tenant=caller.tenant, by=by, since=begin, until=end, environment=chosen)
    rows = [_row(line) for line in lines]
    if format == "csv":
        return Response(_csv(rows), media_type="text/csv; charset=utf-8", headers={"content-disposition": "attachment; filename=bill.csv"})
    return models.Bill(by=by, since=begin, until=end, environment=chosen, rows=rows, totals=_totals(lines))


def _row(line: Line) -> models.BillLine:
    # A function is addressed app/function; its environment stands in `group`.
    shown = [value for name, value in line.group.items() if name != "environment"] or list(line.group.values())
    return models.BillLine(
        name="/".join(shown),
        group=line.group,
        kind=line.kind,
        currency=line.currency,
        records=line.records,
        **line.sums,
        cpu_core_s=line.cpu_core_s,
        memory_gib_s=line.memory_gib_s,
        cost=plain(line.cost),
    )


def plain(amount: Decimal) -> str:
    """A decimal as plain digits, without the zeros that carry nothing: "0.0000131", not "1.310E-5"."""
    text = format(amount, "f")
    return (text.rstrip("0").rstrip(".") or "0") if "." in text else text


def _totals(lines: Iterable[Line]) -> dict[str, str]:
    sums: dict[str, Decimal] = {}
    for line in lines:
        sums[line.currency] = sums.get(line.currency, Decimal(0)) + line.cost
    return {currency: plain(amount) for currency, amount in sums.items()}


def _csv(rows: list[models.BillLine]) -> str:
    out = io.StringIO()
    columns = [name for name in models.BillLine.model_fields if name != "group"]
    writer = csv.DictWriter(out, columns, extrasaction="ignore", lineterminator="\r\n")  # RFC 4180
    writer.writeheader()
    writer.writerows(row.model_dump() for row in rows)
    return out.getvalue()


def _time(name: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        pass  # not a number: a date
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError as e:
        raise InvalidInput(f"{name} = {text!r}: expected seconds since the epoch, or a date such as 2026-11-01", parameter=name) from e
    return (moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)).timestamp()
