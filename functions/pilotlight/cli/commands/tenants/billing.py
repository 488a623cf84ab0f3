"""`pilotlight billing …`: show usage, cost, prices and invoices."""

from __future__ import annotations

import enum
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.commands.tenants.billing_verification import verify
from pilotlight.cli.core.command import command_group
from pilotlight.cli.core.formatting import format_money, format_table, format_time, parse_time
from pilotlight.cli.core.session import Session

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLUMNS = {
    "name": "what",
    "kind": "kind",
    "gpu": "GPU",
    "gpu_state": "GPU state",
    "records": "records",
    "errors": "errors",
    "exec_ms": "busy ms",
    "cpu_core_s": "core s",
    "memory_gib_s": "GiB s",
    "gpu_s": "GPU s",
    "tokens_in": "tokens in",
    "tokens_out": "tokens out",
    "cost": "cost",
    "currency": "",
}
_OFTEN_NOTHING = ("errors", "gpu", "gpu_state", "gpu_s", "tokens_in", "tokens_out")
"""Columns that are shown only if they have values."""
_INVOICES = {
    "id": "id",
    "month": "month",
    "status": "status",
    "total": "total",
    "currency": "",
    "issued_at": "issued",
}
_LINES = {
    "what": "what",
    "kind": "kind",
    "records": "records",
    "billed_ms": "billed ms",
    "cost": "cost",
}
_CORRECTIONS = {"corrects": "corrects", "note": "why", "cost": "cost"}

Currency = Annotated[
    str | None,
    typer.Option(help="Currency, if the month has invoices in several currencies."),
]
Invoice = Annotated[
    str, typer.Argument(metavar="INVOICE", help="Invoice id, or a month such as 2026-11.")
]
Tenant = Annotated[str | None, typer.Option(help="Another tenant; platform administrators only.")]
Customer = Annotated[
    str | None, typer.Option(metavar="ID", help="Only what was recorded for this customer.")
]
Key = Annotated[str | None, typer.Option(metavar="ID", help="Only calls of this key, by its id.")]
Since = Annotated[str | None, typer.Option(help="Start of the period: 24h or 7d ago, or a date.")]
Until = Annotated[str | None, typer.Option(help="End of the period: 1h ago, or a date.")]


class FileFormat(enum.StrEnum):
    """File format of an invoice."""

    CSV = "csv"
    JSON = "json"


class RecordFormat(enum.StrEnum):
    """File format of usage records."""

    NDJSON = "ndjson"
    CSV = "csv"
    CLOUDEVENTS = "cloudevents"


def register(root: typer.Typer) -> None:
    """Add the command group."""
    group = command_group(
        root,
        "billing",
        "Show usage, cost, prices and invoices.",
        {
            "report": report,
            "rates": rates,
            "export": export,
            "correct": correct,
            "verify": verify,
        },
    )
    command_group(
        group,
        "invoice",
        "List, show, issue and download invoices.",
        {
            "list": invoice_list,
            "show": invoice_show,
            "issue": invoice_issue,
            "download": invoice_download,
        },
    )


def report(
    session: Session,
    *,
    since: Since = None,
    until: Until = None,
    by: Annotated[
        str,
        typer.Option(
            help="Group by function, app, environment, revision, key, caller, customer, kind, gpu, "
            "hour, day, or tag:NAME."
        ),
    ] = "function",
    app: Annotated[str | None, typer.Option(help="Only usage of this app.")] = None,
    customer: Customer = None,
    key: Key = None,
    tenant: Tenant = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the report as CSV.")] = False,
) -> None:
    """Report calls, busy time and cost. Each total is the exact sum of its usage records."""
    filters: dict[str, Any] = {
        "by": by,
        "environment": session.options.environment,
        "app": app,
        "customer": customer,
        "key": key,
        "tenant": tenant,
        **_times(since, until),
    }
    body = session.request(
        lambda client: client.billing_report(
            **{name: value for name, value in filters.items() if value is not None}
        )
    )
    if as_csv:
        write_csv(body["rows"])
        return
    session.show(
        body,
        lambda: format_table(
            _named(body["rows"]), _format_row(body["rows"]), empty="No usage yet."
        ),
    )
    if not session.is_json:
        for currency, total in body["totals"].items():
            session.console().print(f"total {format_money(total, currency)}", style="bold")


def rates(session: Session) -> None:
    """Show current prices, and the earlier versions of the price list that were used."""
    body = session.request(lambda client: client.billing_rates())
    session.show(body, lambda: _rates(body))


def invoice_list(session: Session, tenant: Tenant = None) -> None:
    """List issued invoices, and drafts of open months."""
    found = session.request(lambda client: client.invoices(tenant=tenant))
    session.show(
        {"invoices": found},
        lambda: format_table(_plain(found), _INVOICES, empty="No usage yet."),
    )


def invoice_show(
    session: Session,
    *,
    invoice: Invoice,
    currency: Currency = None,
    customer: Customer = None,
    key: Key = None,
    tenant: Tenant = None,
) -> None:
    """Show an invoice with its lines, or the part of it that is of a customer or key."""
    found = session.request(
        lambda client: client.invoice(
            invoice, currency=currency, tenant=tenant, customer=customer, key=key
        )
    )
    session.show(found, lambda: _invoice(found))


def invoice_issue(
    session: Session,
    month: Annotated[str, typer.Argument(metavar="MONTH", help="A past month, such as 2026-10.")],
    tenant: Annotated[
        str | None, typer.Option(help="Only the invoice of this tenant. Default: all tenants.")
    ] = None,
) -> None:
    """Issue a month's invoices now; platform administrators only.

    Otherwise they are issued automatically some days after the end of the month.
    """
    made = session.request(lambda client: client.issue_invoices(month, tenant=tenant))
    session.show(
        {"invoices": made},
        lambda: format_table(
            _plain(made),
            _INVOICES,
            empty=f"No invoice to issue for {month}: all are issued, or there was no usage.",
        ),
    )


def invoice_download(
    session: Session,
    invoice: Invoice,
    *,
    format: Annotated[FileFormat, typer.Option(help="File format.")] = FileFormat.CSV,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to", "-o", help="File to write; - prints to stdout. Default: ./INVOICE.FORMAT."
        ),
    ] = None,
    currency: Currency = None,
    customer: Customer = None,
    key: Key = None,
    tenant: Tenant = None,
) -> None:
    """Download an invoice to a file, or the part of it that is of a customer or key."""
    content = session.request(
        lambda client: client.invoice_file(
            invoice,
            format=format.value,
            currency=currency,
            tenant=tenant,
            customer=customer,
            key=key,
        )
    )
    if str(to) == "-":
        sys.stdout.buffer.write(content)
        return
    part = "".join(f"-{_file_name(name)}" for name in (customer, key) if name)
    path = to or Path(f"{invoice}{part}.{format.value}")
    path.write_bytes(content)
    session.show(
        {"file": str(path), "size_bytes": len(content)}, lambda: f"{invoice} written to {path}"
    )


def export(
    session: Session,
    *,
    since: Since = None,
    until: Until = None,
    month: Annotated[
        str | None, typer.Option(help="Only records of this month's invoice, such as 2026-11.")
    ] = None,
    format: Annotated[
        RecordFormat,
        typer.Option(
            help="File format: ndjson is one JSON object per line; cloudevents the same, each "
            "record as a CloudEvent 1.0."
        ),
    ] = RecordFormat.NDJSON,
    to: Annotated[
        Path | None, typer.Option("--to", "-o", help="File to write. Default: print to stdout.")
    ] = None,
    cursor: Annotated[
        str | None, typer.Option(help="Only records after this record id, to continue an export.")
    ] = None,
    customer: Customer = None,
    tenant: Tenant = None,
) -> None:
    """Export usage records, ordered by time."""
    times = _times(since, until)
    with session.client() as client:
        pieces = client.export_records(
            format=format.value,
            since=times.get("since"),
            until=times.get("until"),
            month=month,
            environment=session.options.environment,
            cursor=cursor,
            tenant=tenant,
            customer=customer,
        )
        if to is None:
            for piece in pieces:
                sys.stdout.buffer.write(piece)
            return
        with to.open("wb") as out:
            size = sum(out.write(piece) for piece in pieces)
    session.show({"file": str(to), "size_bytes": size}, lambda: f"records written to {to}")


def correct(
    session: Session,
    record: Annotated[
        str,
        typer.Argument(metavar="RECORD", help="Id of a usage record, from `billing export`."),
    ],
    amount: Annotated[
        str, typer.Option(help="Amount to add to its cost; --amount=-0.25 is a credit.")
    ],
    note: Annotated[str, typer.Option(help="Reason, printed on the invoice.")],
) -> None:
    """Correct the cost of a usage record; platform administrators only.

    The correction is a new record on the first invoice that is not yet issued.
    """
    made = session.request(lambda client: client.correct(record, amount, note=note))
    session.show(
        made, lambda: f"{format_money(made['cost'], made['currency'])} on {record}: {made['id']}"
    )


def _file_name(text: str) -> str:
    return "".join(one if one.isalnum() or one in "._-@" else "_" for one in text)


def _times(since: str | None, until: str | None) -> dict[str, float]:
    now = time.time()
    return {
        name: parse_time(text, now=now)
        for name, text in {"since": since, "until": until}.items()
        if text
    }


def _format_row(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {
        key: head
        for key, head in _COLUMNS.items()
        if key not in _OFTEN_NOTHING or any(row.get(key) for row in rows)
    }


def _named(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prefix names with the environment if rows are of several: app names may repeat. What belongs
    to no environment (image builds) has no prefix."""
    environments = {row["group"].get("environment") for row in rows} - {None, ""}
    if len(environments) <= 1:
        return rows
    return [
        {**row, "name": f"{row['group']['environment']}: {row['name']}"}
        if row["group"]["environment"]
        else row
        for row in rows
    ]


def _plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "total": format_money(row["total"])} for row in rows]


def _rates(body: dict[str, Any]) -> RenderableType:
    current = body["current"]
    rows = [
        {"name": name, "value": value}
        for name, value in current.items()
        if name not in ("version", "currency", "gpu_s")
    ]
    rows += [{"name": f"gpu_s {gpu}", "value": value} for gpu, value in current["gpu_s"].items()]
    others = [one["version"] for one in body["lists"] if one["version"] != current["version"]]
    heading = f"version {current['version']}, {current['currency']}" + (
        f"; earlier versions: {', '.join(others)}" if others else ""
    )
    return format_table(rows, {"name": heading, "value": "price"}, empty="")


def _invoice(found: dict[str, Any]) -> RenderableType:
    from rich.console import Group

    part = ", ".join(f"{name} {found[name]}" for name in ("customer", "key") if name in found)
    state = (
        f"issued {format_time(found['issued_at'])}"
        if found["issued_at"]
        else f"the part of {part}"
        if part
        else "a draft, which changes until it is issued"
    )
    head = f"{found['id'] or 'draft'}, {found['month']}, {found['tenant']['name']}, {state}"
    lines = [
        {**line, "what": "/".join(part for part in (line["app"], line["function"]) if part)}
        for line in found["lines"]
    ]
    parts: list[RenderableType] = [head, format_table(lines, _LINES, empty="No lines.")]
    if found["corrections"]:
        parts.append(format_table(found["corrections"], _CORRECTIONS, empty=""))
    parts += [
        f"of which late usage of {month}, whose invoice was already issued: {format_money(cost)}"
        for month, cost in found["late"].items()
    ]
    parts.append(f"total {format_money(found['total'], found['currency'])}")
    if credit := found.get("credit"):
        used, due = (format_money(credit[name], found["currency"]) for name in ("used", "due"))
        parts.append(f"of prepaid credit {used}, due {due}")
    return Group(*parts)


def write_csv(rows: list[dict[str, Any]]) -> None:
    """Print rows as CSV (RFC 4180) to stdout: the group's keys first, then the sums."""
    from pilotlight.core.csv_format import csv_lines

    flat = [
        {
            **row["group"],
            **{key: value for key, value in row.items() if key not in ("group", "name")},
        }
        for row in rows
    ]
    sys.stdout.write(
        "".join(csv_lines(list(dict.fromkeys(key for row in flat for key in row)), flat))
    )
