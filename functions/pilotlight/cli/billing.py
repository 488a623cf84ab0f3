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

_COLUMNS = {
    "name": "what",
    "kind": "kind",
    "records": "records",
    "exec_ms": "busy ms",
    "cpu_core_s": "core s",
    "memory_gib_s": "GiB s",
    "cost": "cost",
    "currency": "",
}


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
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the lines as CSV.")] = False,
) -> None:
    """Calls, busy time and cost. A total is the exact sum of its records."""
    now = time.time()
    filters: dict[str, Any] = {"by": by.value, "environment": session.options.environment}
    filters |= {name: instant(text, now=now) for name, text in {"since": since, "until": until}.items() if text}
    with session.client() as client:
        body = client.billing_report(**filters)
    if as_csv:
        write_csv(body["rows"])
        return
    session.show(body, lambda: table(_named(body["rows"]), _COLUMNS, empty="Nothing was used yet."))
    if not session.is_json:
        for currency, total in body["totals"].items():
            session.console().print(f"total {money(total, currency)}", style="bold")


def _named(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of several environments say which: an app may have one name in all of them."""
    environments = {row["group"].get("environment") for row in rows} - {None}
    return [{**row, "name": f"{row['group']['environment']}: {row['name']}"} for row in rows] if len(environments) > 1 else rows


def write_csv(rows: list[dict[str, Any]]) -> None:
    """RFC 4180 on stdout: the group's keys first, then the sums."""
    flat = [{**row["group"], **{key: value for key, value in row.items() if key not in ("group", "name")}} for row in rows]
    writer = csv.DictWriter(sys.stdout, fieldnames=list(dict.fromkeys(key for row in flat for key in row)), restval="")
    writer.writeheader()
    writer.writerows(flat)
