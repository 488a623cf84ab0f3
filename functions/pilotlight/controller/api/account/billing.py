"""Routes for call records and billing reports."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from decimal import Decimal
from typing import Annotated, Any, Literal

from fastapi import Query, Response

from pilotlight.controller.analytics import usage_reports
from pilotlight.controller.analytics.usage_reports import ReportLine
from pilotlight.controller.api import schemas
from pilotlight.controller.context import Biller, Ctx, Invoker
from pilotlight.controller.identity import tenants
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.scheduling import submitted_calls
from pilotlight.core import csv_format
from pilotlight.errors import Forbidden, InvalidInput, NotFound
from pilotlight.spec.identifiers import MAX_CUSTOMER_LENGTH

Grouping = Annotated[
    str,
    Query(
        pattern=f"^({'|'.join(usage_reports.GROUPS)}|{usage_reports.TAG}.{{1,64}})$",
        description=f"{', '.join(usage_reports.GROUPS)}, or {usage_reports.TAG}<name>",
    ),
]

YEAR_10000_S = 253_402_300_800.0
COLUMNS = tuple(name for name in schemas.BillLine.model_fields if name != "group")
"""The columns of a billing report as CSV."""
router = APIRouter(prefix="/v1", tags=["books"])
Tenant = Annotated[
    str | None, Query(description="name of another tenant (platform administrators only)")
]
Customer = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=MAX_CUSTOMER_LENGTH,
        description="only what was recorded for this customer (`Pilotlight-Customer`)",
    ),
]


@router.get("/calls/{call}")
def get_call(context: Ctx, caller: Invoker, call: str) -> dict[str, Any]:
    """Return a call: its record (`pilotlight.protocol.CallRecord`) and its `attempts` (usage
    records)."""
    with context.store.read() as sql:
        found = submitted_calls.get(sql, tenant=caller.tenant, call=call)
    if caller.bound_environment not in (None, found["environment"]) or not caller.may_see(
        found["app"], found["function"]
    ):
        raise NotFound(f"there is no call {call}")
    return found


@router.get("/billing/report", response_model=schemas.Bill)
def billing_report(
    *,
    context: Ctx,
    caller: Biller,
    since: Annotated[
        str | None,
        Query(description="seconds since the epoch, or ISO 8601 (UTC if without a time zone)"),
    ] = None,
    until: Annotated[str | None, Query(description="same formats as `since`; exclusive")] = None,
    by: Grouping = "function",
    environment: str | None = None,
    app: str | None = None,
    function: str | None = None,
    tenant: Tenant = None,
    customer: Customer = None,
    key: Annotated[str | None, Query(max_length=512, description="only calls of this key")] = None,
    format: Literal["json", "csv"] = "json",
) -> schemas.Bill | Response:
    """Report usage and its exact cost."""
    if caller.bound_environment not in (None, environment or caller.bound_environment):
        raise Forbidden(f"key {caller.key} is bound to environment {caller.bound_environment!r}")
    begin, end = parse_time("since", since), parse_time("until", until)
    selected = environment or caller.bound_environment
    app, function = caller.restrict(app, function)
    scope = {"app": app, "function": function, "customer": customer, "key": key}
    where = {name: value for name, value in scope.items() if value is not None}
    with context.store.read() as sql:
        lines = usage_reports.report(
            sql,
            tenant=tenants.resolve_tenant(sql, caller, name=tenant),
            by=by,
            since=begin,
            until=end,
            environment=selected,
            where=where,
        )
    rows = [_row(line) for line in lines]
    if format == "csv":
        table = "".join(csv_format.csv_lines(COLUMNS, (row.model_dump() for row in rows)))
        return Response(
            table,
            media_type=csv_format.CONTENT_CSV,
            headers={"content-disposition": "attachment; filename=bill.csv"},
        )
    return schemas.Bill(
        by=by, since=begin, until=end, environment=selected, rows=rows, totals=_totals(lines)
    )


def _row(line: ReportLine) -> schemas.BillLine:
    # A function is addressed as app/function; its environment is in `group`.
    shown = [value for name, value in line.group.items() if name != "environment"] or list(
        line.group.values()
    )
    return schemas.BillLine(
        name="/".join(filter(None, shown)) or "(none)",
        group=line.group,
        kind=line.kind,
        gpu=line.gpu,
        gpu_state=line.gpu_state,
        currency=line.currency,
        records=line.records,
        errors=line.errors,
        **line.sums,
        cpu_core_s=line.cpu_core_s,
        memory_gib_s=line.memory_gib_s,
        gpu_s=line.gpu_s,
        cost=format_decimal(line.cost),
    )


def format_decimal(amount: Decimal) -> str:
    """Format a decimal as plain digits without trailing zeros: "0.0000131", not "1.310E-5"."""
    text = format(amount, "f")
    return (text.rstrip("0").rstrip(".") or "0") if "." in text else text


def _totals(lines: Iterable[ReportLine]) -> dict[str, str]:
    sums: dict[str, Decimal] = {}
    for line in lines:
        sums[line.currency] = sums.get(line.currency, Decimal(0)) + line.cost
    return {currency: format_decimal(amount) for currency, amount in sums.items()}


def parse_time(name: str, text: str | None) -> float | None:
    """Parse a time in a query. Raises InvalidInput."""
    if text is None:
        return None
    try:
        found = _seconds(text)
    except ValueError as e:
        raise InvalidInput(
            f"{name} = {text!r}: expected seconds since the epoch, or a date such as 2026-11-01",
            parameter=name,
        ) from e
    if not abs(found) < YEAR_10000_S:
        raise InvalidInput(f"{name} = {text!r}: the date is out of range", parameter=name)
    return found


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        found = dt.datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=dt.UTC)).timestamp()
