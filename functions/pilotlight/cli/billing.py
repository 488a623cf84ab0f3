"""`pilotlight billing report`: what was used and what it cost."""

from __future__ import annotations

import csv
import enum
import sys
import time
from typing import Annotated, Any

import typer

from pilotlight.cli.commands import command
from pilotlight.cli.output import instant, money, table
from pilotlight.cli.session import Session


class By(enum.StrEnum):
    """What a report's lines are grouped by."""

    FUNCTION = "function"
    APP = "app"
    ENVIRONMENT = "environment"
    REVISION = "revision"
    KEY = "key"
    DAY = "day"


def register(root: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(help="Usage and cost.", no_args_is_help=True)
    group.callback()(lambda: None)
    command(group, "report")(report)
    root.add_typer(group, name="billing")


def report(
    session: Session,
    *,
    since: Annotated[str | None, typer.Option(help="From: 24h, 7d, or a date.")] = None,
    until: Annotated[str | None, typer.Option(help="To: 1h (ago), or a date.")] = None,
    by: Annotated[By, typer.Option(help="One line for each.")] = By.FUNCTION,
    app: Annotated[str | None, typer.Option(help="Only this app.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the lines as CSV.")] = False,
) -> None:
    """Calls, busy time and cost. A total is the exact sum of its records."""
    now = time.time()
    filters: dict[str, Any] = {"app": app, "group_by": by.value}
    filters |= {name: instant(text, now=now) for name, text in {"since": since, "until": until}.items() if text}
    with session.client() as client:
        body = client.billing_report(**filters)
    rows = report_rows(body)
    if as_csv:
        write_csv(rows)
        return
    session.show(body, lambda: table(rows, {key: key.replace("_", " ") for key in columns_of(rows)}, empty="Nothing was used yet."))
    if not session.is_json and (total := total_of(body)) is not None:
        session.console().print(f"total {money(total, str(body.get('currency', '')))}", style="bold")


def report_rows(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The report's lines."""
    return [row for row in next((body[key] for key in ("rows", "groups", "lines") if isinstance(body.get(key), list)), []) if row]


def total_of(body: dict[str, Any]) -> Any:
    """The report's total cost, where it says one."""
    total = body.get("total")
    return total.get("cost") if isinstance(total, dict) else total if total is not None else body.get("cost")


def columns_of(rows: list[dict[str, Any]]) -> list[str]:
    """Every key of every row, in order of first appearance, the cost last."""
    seen = dict.fromkeys(key for row in rows for key in row)
    return [*(key for key in seen if key != "cost"), *(["cost"] if "cost" in seen else [])]


def write_csv(rows: list[dict[str, Any]]) -> None:
    """RFC 4180 on stdout."""
    writer = csv.DictWriter(sys.stdout, fieldnames=columns_of(rows), restval="")
    writer.writeheader()
    writer.writerows(rows)
