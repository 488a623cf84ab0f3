"""Pages of invoices: the list, one invoice with its lines, and downloads."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Annotated, Any

from fastapi import Path, Query
from fastapi.responses import Response

from pilotlight.controller.billing import invoices
from pilotlight.controller.dashboard.html import render
from pilotlight.controller.dashboard.page_context import MAX_NAME, PageContext, PageRoute, Visitor
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.core import csv_format

_Which = Annotated[str, Path(max_length=MAX_NAME)]
_Currency = Annotated[str | None, Query(max_length=MAX_NAME)]

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@router.get("/dashboard/invoices")
async def listing(visit: Visitor) -> Response:
    """Render all months with an invoice, issued or draft."""
    visit.caller.require_whole_tenant()
    found = await visit.read(lambda sql: invoices.listing(sql, tenant=visit.caller.tenant))
    return render("invoices.html", visit=visit, found=found, decimal=Decimal, name_of=_name_of)


@router.get("/dashboard/invoices/{which}.json")
async def as_json_file(visit: Visitor, which: _Which, currency: _Currency = None) -> Response:
    """Download the invoice as JSON."""
    document = await _document(visit, which, currency)
    return _file(
        json.dumps(document, indent=2, ensure_ascii=False),
        "application/json",
        f"{_name_of(document)}.json",
    )


@router.get("/dashboard/invoices/{which}.csv")
async def as_csv_file(visit: Visitor, which: _Which, currency: _Currency = None) -> Response:
    """Download the invoice's lines and corrections as CSV."""
    document = await _document(visit, which, currency)
    text = "".join(csv_format.csv_lines(invoices.COLUMNS, invoices.rows(document)))
    return _file(text, csv_format.CONTENT_CSV, f"{_name_of(document)}.csv")


@router.get("/dashboard/invoices/{which}")
async def one(visit: Visitor, which: _Which, currency: _Currency = None) -> Response:
    """Render one invoice with its lines. Raises NotFound if this tenant has no such invoice."""
    document = await _document(visit, which, currency)
    lines = sorted(document["lines"], key=lambda line: -Decimal(line["cost"]))
    return render("invoice.html", visit=visit, document=document, lines=lines, decimal=Decimal)


async def _document(visit: PageContext, which: str, currency: str | None) -> dict[str, Any]:
    visit.caller.require_whole_tenant()
    return await visit.read(
        lambda sql: invoices.show(
            sql, tenant=visit.caller.tenant, which=which, currency=currency, now=visit.now
        )
    )


def _name_of(document: dict[str, Any]) -> str:
    """Return the file name of an invoice, without extension."""
    return f"{document['id'] or document['month'] + '-draft'}-{document['currency']}"


def _file(text: str, kind: str, name: str) -> Response:
    headers = {
        "content-disposition": f'attachment; filename="{name}"',
        "cache-control": "no-store",
        "x-content-type-options": "nosniff",
    }
    return Response(text.encode(), media_type=kind, headers=headers)
