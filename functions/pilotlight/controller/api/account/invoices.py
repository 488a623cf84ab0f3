"""Routes for invoices, price lists, corrections and billing records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import Path, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import Field

from pilotlight.controller.api.account.billing import Customer, Tenant, parse_time
from pilotlight.controller.api.schemas import Body
from pilotlight.controller.billing import corrections, invoices, price_lists, rollups, usage_exports
from pilotlight.controller.context import Admin, Biller, Context, Ctx, RequestId
from pilotlight.controller.database import audit_trail
from pilotlight.controller.identity import tenants
from pilotlight.controller.identity.access_control import PLATFORM_TENANT, Principal
from pilotlight.controller.identity.tenant_plan import tenant_plan_of
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.usage_archive import archives
from pilotlight.controller.usage_archive.verification import check_archive
from pilotlight.controller.weights.blob_upload import store_errors
from pilotlight.core import csv_format
from pilotlight.errors import Forbidden
from pilotlight.protocol import CONTENT_NDJSON
from pilotlight.spec.identifiers import Scope
from pilotlight.spec.pricing import picos_text

router = APIRouter(prefix="/v1/billing", tags=["billing"])
Amount = Annotated[str, Field(description="a decimal with twelve decimal places")]
MAX_EXPORT = 10_000_000
MAX_ARCHIVES = 10**8
"""Highest number of an archive: names of their objects have eight digits."""


class InvoiceSummary(Body):
    """An invoice in a list. A draft has no id."""

    id: str | None
    month: str
    currency: str
    total: Amount
    status: Literal["draft", "issued"]
    issued_at: float | None


class InvoiceList(Body):
    """A tenant's invoices, newest month first."""

    invoices: list[InvoiceSummary]


class IssueRequest(Body):
    """Which invoices to issue now: those of a past month. `tenant` null: of all tenants."""

    month: str = Field(description="such as 2026-11")
    tenant: str | None = None


class CorrectionRequest(Body):
    """An amount to add to a record's cost; negative amounts are credits. `note`: the reason, shown
    on the invoice."""

    record: str
    amount: str
    note: str = Field(max_length=corrections.MAX_NOTE_CHARS)


class RateLists(Body):
    """Price lists (`pilotlight.spec.pricing.Rates`). `current` prices new usage; `lists` includes
    those that priced earlier usage."""

    current: dict[str, Any]
    lists: list[dict[str, Any]]


@router.get("/invoices", response_model=InvoiceList)
def list_invoices(context: Ctx, caller: Biller, tenant: Tenant = None) -> dict[str, Any]:
    """List the issued invoices, and a draft for every open month."""
    caller.require_whole_tenant()
    with context.store.read() as sql:
        return {
            "invoices": invoices.listing(
                sql, tenant=tenants.resolve_tenant(sql, caller, name=tenant)
            )
        }


@router.get("/invoices/{invoice}")
def show_invoice(
    *,
    context: Ctx,
    caller: Biller,
    invoice: str,
    currency: str | None = None,
    tenant: Tenant = None,
    customer: Customer = None,
    key: Annotated[
        str | None, Query(min_length=1, max_length=512, description="only calls of this key")
    ] = None,
    format: Literal["json", "csv"] = "json",
) -> Response:
    """Return an invoice by its id, or that of a month (`2026-11`), which is a draft until it is
    issued. With `customer` or `key` a statement: the part of it that is of these."""
    caller.require_whole_tenant()
    named = {"customer": customer, "key": key}
    part = {name: value for name, value in named.items() if value is not None}
    with context.store.read() as sql:
        owner, now = tenants.resolve_tenant(sql, caller, name=tenant), context.clock()
        if part:
            found = invoices.statement(
                sql, tenant=owner, which=invoice, currency=currency, part=part, now=now
            )
        else:
            found = invoices.show(sql, tenant=owner, which=invoice, currency=currency, now=now)
    name = f"{found['id'] or 'draft'}-{found['month']}-{found['currency']}.{format}"
    text = as_csv(found) if format == "csv" else json.dumps(found, ensure_ascii=False)
    kind = csv_format.CONTENT_CSV if format == "csv" else "application/json"
    return Response(
        text, media_type=kind, headers={"content-disposition": f'attachment; filename="{name}"'}
    )


@router.post("/invoices", response_model=InvoiceList)
def issue_invoices(
    context: Ctx, caller: Admin, request: RequestId, body: IssueRequest
) -> dict[str, Any]:
    """Issue the invoices of a month now, without waiting for `invoice_after_days` (platform
    administrators only)."""
    caller.require_platform()
    invoices.month_ends_at(body.month)
    with context.store.write() as write:
        tenant = None if body.tenant is None else tenants.find(write.sql, name=body.tenant).id
        made = [
            invoices.issue(
                write,
                tenant=owner,
                month=body.month,
                currency=currency,
                actor=caller.key,
                request=request,
            )
            for owner, currency in invoices.open_in(write.sql, month=body.month, tenant=tenant)
        ]
    return {"invoices": [{name: one[name] for name in InvoiceSummary.model_fields} for one in made]}


@router.post("/corrections", status_code=201)
def correct(
    context: Ctx, caller: Admin, request: RequestId, body: CorrectionRequest
) -> dict[str, Any]:
    """Add an ADJUSTMENT to a record of any tenant (platform administrators only). Repeating the
    request with the same x-request-id returns the same adjustment."""
    caller.require_platform()
    with context.store.write() as write:
        made = corrections.correct(
            write,
            record=body.record,
            amount=body.amount,
            note=body.note,
            actor=caller.key,
            request=request,
        )
    return made.to_json()


@router.get("/rates")
def rates(context: Ctx, caller: Biller) -> RateLists:
    """Return the prices of the caller's plan and those that priced its earlier records; for the
    platform administrators, every price list ever used."""
    with context.store.read() as sql:
        row = tenants.get(sql, tenant=caller.tenant)
        version = tenant_plan_of(row, context.config.plans).resolve().prices
        known, used = price_lists.listing(sql), price_lists.used(sql, tenant=caller.tenant)
    lists = context.config.prices.lists()
    current = lists.get(version or context.config.prices.version, context.config.prices.rates())
    seen = (
        known
        if _is_platform_administrator(caller)
        else [one for one in known if one["version"] in used | {current.version}]
    )
    return RateLists(current=current.to_json(), lists=seen)


@router.get("/records", response_class=StreamingResponse)
def export(
    *,
    context: Ctx,
    caller: Biller,
    since: Annotated[
        str | None,
        Query(description="seconds since the epoch, or ISO 8601 (UTC if without a time zone)"),
    ] = None,
    until: Annotated[str | None, Query(description="same formats as `since`; exclusive")] = None,
    month: Annotated[
        str | None, Query(description="only records on this month's invoice, such as 2026-11")
    ] = None,
    environment: str | None = None,
    tenant: Tenant = None,
    customer: Customer = None,
    format: Annotated[
        Literal["ndjson", "csv", "cloudevents"],
        Query(description="cloudevents: each record as a CloudEvent 1.0, one JSON object a line"),
    ] = "ndjson",
    cursor: Annotated[
        str | None, Query(description="id of the last record received: continue after it")
    ] = None,
    limit: Annotated[int | None, Query(ge=1, le=MAX_EXPORT)] = None,
) -> StreamingResponse:
    """Stream the records behind a bill, ordered by time."""
    caller.require_whole_environment()
    if caller.bound_environment not in (None, environment or caller.bound_environment):
        raise Forbidden(f"key {caller.key} is bound to environment {caller.bound_environment!r}")
    with context.store.read() as sql:
        owner = tenants.resolve_tenant(sql, caller, name=tenant)
    filters = usage_exports.ExportQuery(
        tenant=owner,
        since=parse_time("since", since),
        until=parse_time("until", until),
        environment=environment or caller.bound_environment,
        month=month,
        customer=customer,
    )
    after = None
    if cursor is not None:
        with context.store.read() as sql:
            after = usage_exports.position(sql, tenant=owner, cursor=cursor)
    body = _records(context, filters, after=after, limit=limit, format=format)
    kind = csv_format.CONTENT_CSV if format == "csv" else CONTENT_NDJSON
    name = "records.csv" if format == "csv" else "records.ndjson"
    return StreamingResponse(
        body, media_type=kind, headers={"content-disposition": f'attachment; filename="{name}"'}
    )


class LedgerDifference(Body):
    """A rollup sum that differs from the records: [number of records, amount]."""

    table: str
    tenant: str
    month: str
    currency: str
    expected: tuple[int, Amount]
    found: tuple[int, Amount]


class InvoiceDifference(Body):
    """An issued invoice whose total is not the sum of its records."""

    id: str
    tenant: str
    month: str
    currency: str
    expected: Amount
    found: Amount


class Verification(Body):
    """The number of records checked, where the rollups differ from them, and which invoices differ
    from the rollups. `archives`: number of the last archive of records, for platform
    administrators; else null."""

    records: int
    differences: list[LedgerDifference]
    invoices: list[InvoiceDifference]
    archives: int | None


class ArchiveVerification(Body):
    """The check of one archive; `problem` "": it is the one that was written, and follows the one
    before."""

    number: int
    records: int
    sha256: str
    problem: str


class Rebuilt(Body):
    """The number of records from which the rollups were rebuilt."""

    records: int


@router.get("/verification")
def verify(context: Ctx, caller: Admin) -> Verification:
    """Compare the rollups that reports read with the records, and issued invoices with the rollups;
    for platform administrators, of all tenants."""
    caller.require_whole_tenant()
    tenant = None if _is_platform_administrator(caller) else caller.tenant
    with context.store.read() as sql:
        records, found = rollups.count(sql, tenant=tenant), rollups.verify(sql, tenant=tenant)
        issued = invoices.verify_totals(sql, tenant=tenant)
        last = archives.newest(sql) if tenant is None else None
    differences = [
        LedgerDifference(
            table=one.table,
            tenant=one.tenant,
            month=one.month,
            currency=one.currency,
            expected=(one.expected[0], picos_text(one.expected[1])),
            found=(one.found[0], picos_text(one.found[1])),
        )
        for one in found
    ]
    return Verification(
        records=records,
        differences=differences,
        invoices=[InvoiceDifference(**asdict(one)) for one in issued],
        archives=None if tenant is not None else 0 if last is None else last.number,
    )


@router.get("/archives/{number}/verification")
async def verify_archive(
    context: Ctx, caller: Admin, number: Annotated[int, Path(ge=1, le=MAX_ARCHIVES)]
) -> ArchiveVerification:
    """Check an archive of usage records in the blob store: its hash, that of the one before, and
    its sums (platform administrators only). 503 while the blob store does not answer."""
    caller.require_platform()
    async with context.downloads.share(caller.tenant):  # it is in memory
        with store_errors():
            done = await check_archive(context.store, context.files.objects, number)
    return ArchiveVerification(**asdict(done))


@router.post("/rollups:rebuild")
def rebuild(context: Ctx, caller: Admin, request: RequestId) -> Rebuilt:
    """Rebuild the rollups that reports read from the records, for all tenants (platform
    administrators only)."""
    caller.require_platform()
    with context.store.write() as write:
        records = rollups.rebuild(write)
        after = {"records": records}
        audit_trail.record(
            write,
            tenant=caller.tenant,
            actor=caller.key,
            action="billing.rebuild",
            subject="rollups",
            after=after,
            request=request,
        )
    return Rebuilt(records=records)


def _is_platform_administrator(caller: Principal) -> bool:
    return caller.tenant_name == PLATFORM_TENANT and caller.scope is Scope.ADMIN


def as_csv(document: Mapping[str, Any]) -> str:
    """Format an invoice as CSV: its lines and corrections, which add up to its total."""
    return "".join(csv_format.csv_lines(invoices.COLUMNS, invoices.rows(document)))


def _records(
    context: Context,
    filters: usage_exports.ExportQuery,
    *,
    after: tuple[float, str] | None,
    limit: int | None,
    format: str,
) -> Iterator[str]:
    if format == "csv" and after is None:
        yield "".join(csv_format.csv_lines(usage_exports.FIELDS, []))
    for page in usage_exports.pages(context.store, filters, after=after, limit=limit):
        if format == "csv":
            yield "".join(csv_format.csv_lines(usage_exports.FIELDS, page, with_head=False))
        else:
            events = format == "cloudevents"
            found = map(usage_exports.cloud_event, page) if events else page
            yield "".join(f"{json.dumps(one, ensure_ascii=False)}\n" for one in found)
