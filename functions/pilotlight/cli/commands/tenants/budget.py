"""`pilotlight budget …`: what may be spent, what was, and who is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.core.command import Yes, command
from pilotlight.cli.core.formatting import format_money, format_table, format_time
from pilotlight.cli.core.session import Session
from pilotlight.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pilotlight.client.client import Client

Id = Annotated[str, typer.Argument(metavar="ID", help="As `pilotlight budget list` shows it.")]
_COLUMNS = {
    "id": "id",
    "covers": "covers",
    "period": "per",
    "amount": "amount",
    "spent": "spent",
    "percent": "%",
    "expected": "expected",
    "currency": "",
    "stops": "at 100 %",
    "webhook": "webhook",
}
_ALERT_COLUMNS = {
    "period": "period",
    "percent": "%",
    "spent": "spent",
    "reached_at": "reached",
    "delivered_at": "delivered",
    "attempts": "attempts",
    "next_attempt_at": "next attempt",
    "error": "error",
}
_EVERYTHING = "everything"


class Per(StrEnum):
    """The period of a budget, of the calendar in UTC."""

    DAY = "day"
    MONTH = "month"


def register(root: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(
        help="Budgets: what may be spent in a day or a month, and who is told.",
        no_args_is_help=True,
    )
    verbs: dict[str, Callable[..., None]] = {
        "set": set_,
        "list": list_,
        "show": show,
        "delete": delete,
        "test": test,
    }
    for name, function in verbs.items():
        command(group, name)(function)
    root.add_typer(group, name="budget")


def set_(
    session: Session,
    *,
    amount: Annotated[
        str, typer.Argument(metavar="AMOUNT", help="What may be spent in one period: 250, 0.05.")
    ],
    app: Annotated[str, typer.Option(help="It covers this app only. Default: all.")] = "",
    function: Annotated[
        str, typer.Option(metavar="APP/FUNCTION", help="It covers this function only.")
    ] = "",
    only_environment: Annotated[
        str, typer.Option(help="It covers this environment only. Default: all.")
    ] = "",
    period: Annotated[Per, typer.Option(help="Of the calendar, in UTC.")] = Per.MONTH,
    currency: Annotated[str | None, typer.Option(help="Default: that of your price list.")] = None,
    hard: Annotated[
        bool | None,
        typer.Option(
            "--hard/--soft", help="Refuse calls when it is spent, or only warn. Default: hard."
        ),
    ] = None,
    alert: Annotated[
        list[int] | None,
        typer.Option(help="Percent at which to alert; several times. Default: 50, 80, 100."),
    ] = None,
    webhook: Annotated[
        str | None, typer.Option(help="URL that alerts are posted to, signed; '' takes it away.")
    ] = None,
    new_secret: Annotated[
        bool, typer.Option("--new-secret", help="Replace the secret that messages are signed with.")
    ] = False,
) -> None:
    """Make a budget, or change the one of the same reach and period; what is not named stays as it
    is."""
    if function:
        app, function = _split(function, app)
    reach = {
        "environment": only_environment,
        "app": app,
        "function": function,
        "period": period.value,
    }
    named = {"hard": hard, "alerts": alert or None, "webhook": webhook}
    with session.client() as client:
        kept = _kept(client, {**reach, "currency": currency})
        values = {
            **kept,
            **reach,
            **{key: value for key, value in named.items() if value is not None},
        }
        body = client.set_budget(
            amount, **{**values, "webhook": values.get("webhook") or None, "new_secret": new_secret}
        )
    session.show(body, lambda: _sentence(body))
    if body["webhook_secret"]:
        session.say(f"{body['webhook_secret']} signs its messages; shown this one time")


def list_(session: Session) -> None:
    """Budgets, what was spent of them, and what is expected by the end of the period."""
    with session.client() as client:
        rows = client.budgets()
    session.show(
        rows, lambda: format_table([_row(row) for row in rows], _COLUMNS, empty="No budgets.")
    )


def show(session: Session, budget: Id) -> None:
    """One budget: spending, forecast and every alert."""
    with session.client() as client:
        body = client.budget(budget)
        alerts = client.budget_alerts(budget)
    session.show({**body, "alerted": alerts}, lambda: _details(body, alerts))


def delete(session: Session, budget: Id, yes: Yes = False) -> None:
    """Delete a budget and its alerts; nothing stops at it any more."""
    session.confirm(f"Delete the budget {budget}? Nothing will stop at it any more.", yes=yes)
    with session.client() as client:
        client.delete_budget(budget)
    session.show({"id": budget, "deleted": True}, lambda: f"{budget} is deleted")


def test(session: Session, budget: Id) -> None:
    """Post a signed example to a budget's webhook, and say what became of it."""
    with session.client() as client:
        body = client.test_budget(budget)
    session.show(body, lambda: _tested(body))
    if body["error"] is not None:
        raise typer.Exit(1)


def _split(path: str, app: str) -> tuple[str, str]:
    named, slash, function = path.partition("/")
    if not (named and slash and function) or app not in ("", named):
        raise InvalidInput(
            f"--function {path!r} is not clear",
            hint="Write --function APP/FUNCTION, without --app.",
        )
    return named, function


def _kept(client: Client, reach: dict[str, str | None]) -> dict[str, Any]:
    """What the budget of that reach says already; a currency that is not named is any, where there
    is only one."""
    wanted = {key: value for key, value in reach.items() if value is not None}
    found = [row for row in client.budgets() if wanted.items() <= row.items()]
    if len(found) != 1:
        return {"currency": reach["currency"]}
    return {key: found[0][key] for key in ("currency", "hard", "alerts", "webhook")}


def _covers(row: dict[str, Any]) -> str:
    inside = "/".join(part for part in (row["app"], row["function"]) if part) or _EVERYTHING
    return f"{row['environment']}: {inside}" if row["environment"] else inside


def _about(amount: str) -> str:
    """A forecast to four digits: more would look like knowledge."""
    return format_money(Decimal(f"{Decimal(amount):.4g}"))


def _row(row: dict[str, Any]) -> dict[str, Any]:
    expected = row["forecast"] and _about(row["forecast"]["expected"])
    return {
        **row,
        "covers": _covers(row),
        "expected": expected,
        "stops": "calls stop" if row["hard"] else "warns",
    }


def _sentence(body: dict[str, Any]) -> str:
    verb = "set" if body["created"] else "changed"
    then = "calls are refused when it is spent" if body["hard"] else "it only warns"
    return (
        f"{body['id']} is {verb}: {format_money(body['amount'], body['currency'])} per "
        f"{body['period']} for {_covers(body)}; {then}"
    )


def _details(body: dict[str, Any], alerts: list[dict[str, Any]]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    currency, seen = body["currency"], body["forecast"]
    lines = [
        f"{body['id']}: {format_money(body['amount'], currency)} per {body['period']} for {_covers(body)}",
        (
            f"spent     {format_money(body['spent'], currency)} of {body['current']}, {body['percent']:g} %; "
            f"left {format_money(body['left'], currency)}"
        ),
        f"ends      {format_time(body['ends_at'])}",
    ]
    if seen:
        band = (
            f" ({_about(seen['low'])} to {_about(seen['high'])}, 8 of 10 times)"
            if seen["low"] is not None
            else ""
        )
        basis = f"{seen['basis_days']} full days" if seen["basis_days"] else "today so far"
        lines.append(f"expected  {_about(seen['expected'])} {currency}{band}, by {basis}")
        if seen["reached_at"] and not body["is_spent"]:
            lines.append(f"reached   {format_time(seen['reached_at'])} at that pace")
    lines.append(
        f"alerts    at {', '.join(f'{percent} %' for percent in body['alerts'])}; webhook "
        f"{body['webhook'] or 'none'}"
    )
    return Group(
        *(Text(line) for line in lines),
        format_table(
            [{**alert, "reached_at": alert["at"]} for alert in alerts],
            _ALERT_COLUMNS,
            empty="No alert yet.",
        ),
    )


def _tested(body: dict[str, Any]) -> RenderableType:
    from rich.text import Text

    head = f"answered {body['status']}" if body["status"] else "no answer"
    end = "taken" if body["error"] is None else body["error"]
    sent = "\n".join(f"{name}: {value}" for name, value in body["headers"].items())
    return Text(
        f"{head} after {body['elapsed_ms']} ms: {end}\n\nPOST "
        f"{body['url']}\n{sent}\n\n{json.dumps(json.loads(body['body']), indent=2)}"
    )
