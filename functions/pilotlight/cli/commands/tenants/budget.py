"""`pilotlight budget …`: manage budgets and their alerts."""

from __future__ import annotations

import json
from decimal import Decimal
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.core.addresses import parse_optional_function
from pilotlight.cli.core.command import Yes, command_group
from pilotlight.cli.core.formatting import format_money, format_table, format_time
from pilotlight.cli.core.session import Session
from pilotlight.spec.identifiers import ANY_CUSTOMER

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pilotlight.client.client import Client

Id = Annotated[str, typer.Argument(metavar="ID", help="Id, from `pilotlight budget list`.")]
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
    """Calendar period of a budget, in UTC."""

    DAY = "day"
    MONTH = "month"


def register(root: typer.Typer) -> None:
    """Add the command group."""
    command_group(
        root,
        "budget",
        "Manage budgets, which limit spending per day or month and send alerts.",
        {
            "set": set_,
            "list": list_,
            "show": show,
            "delete": delete,
            "test": test,
        },
    )


Amount = Annotated[
    str, typer.Argument(metavar="AMOUNT", help="Amount per period, such as 250 or 0.05.")
]
OnlyApp = Annotated[str, typer.Option(help="Cover only this app. Default: all apps.")]
OnlyFunction = Annotated[
    str, typer.Option(metavar="APP/FUNCTION", help="Cover only this function.")
]
OnlyEnvironment = Annotated[
    str, typer.Option(help="Cover only this environment. Default: all environments.")
]
OnlyCustomer = Annotated[
    str,
    typer.Option(
        metavar="ID",
        help="Cover only calls for this customer; '*' gives each customer that has no own one "
        "such a budget.",
    ),
]
OfCustomer = Annotated[
    str | None,
    typer.Option("--customer", metavar="ID", help="Only the budgets of this customer."),
]
Period = Annotated[Per, typer.Option(help="Calendar period, in UTC.")]
Currency = Annotated[str | None, typer.Option(help="Currency. Default: that of your price list.")]
IsHard = Annotated[
    bool | None,
    typer.Option(
        "--hard/--soft",
        help="Refuse calls when the budget is spent, or only send alerts. Default: hard.",
    ),
]
AlertAt = Annotated[
    list[int] | None,
    typer.Option(
        help="Percentage of the budget at which to alert; may be repeated. Default: 50, 80, 100."
    ),
]
WebhookUrl = Annotated[
    str | None,
    typer.Option(help="URL to which signed alerts are posted; '' removes the webhook."),
]
NewSecret = Annotated[bool, typer.Option("--new-secret", help="Replace the signing secret.")]


def set_(
    session: Session,
    *,
    amount: Amount,
    app: OnlyApp = "",
    function: OnlyFunction = "",
    only_environment: OnlyEnvironment = "",
    customer: OnlyCustomer = "",
    period: Period = Per.MONTH,
    currency: Currency = None,
    hard: IsHard = None,
    alert: AlertAt = None,
    webhook: WebhookUrl = None,
    new_secret: NewSecret = False,
) -> None:
    """Create a budget, or change the one with the same scope and period.

    Options that are not given keep their values.
    """
    only_app, only_function = parse_optional_function(function, app)
    reach = {
        "environment": only_environment,
        "app": only_app or "",
        "function": only_function or "",
        "customer": customer,
        "period": period.value,
    }
    named = {"hard": hard, "alerts": alert or None, "webhook": webhook}
    with session.client() as client:
        kept = _current_values(client, {**reach, "currency": currency})
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
        session.say(f"signing secret, shown only once: {body['webhook_secret']}")


def list_(session: Session, customer: OfCustomer = None) -> None:
    """List budgets with current spending and the forecast for the end of the period.

    With --customer, also what this customer has of a budget for each customer.
    """
    rows = session.request(lambda client: client.budgets(customer=customer))
    session.show(
        rows, lambda: format_table([_row(row) for row in rows], _COLUMNS, empty="No budgets.")
    )


def show(session: Session, budget: Id) -> None:
    """Show a budget: spending, forecast and alerts."""
    with session.client() as client:
        body = client.budget(budget)
        alerts = client.budget_alerts(budget)
    session.show({**body, "alerted": alerts}, lambda: _details(body, alerts))


def delete(session: Session, budget: Id, yes: Yes = False) -> None:
    """Delete a budget and its alerts. It no longer limits spending."""
    session.confirm(f"Delete the budget {budget}? It will no longer limit spending.", yes=yes)
    session.request(lambda client: client.delete_budget(budget))
    session.show({"id": budget, "deleted": True}, lambda: f"{budget} is deleted")


def test(session: Session, budget: Id) -> None:
    """Send a signed test alert to a budget's webhook and show the response.

    The exit status is 1 if the delivery fails.
    """
    show_example(session, session.request(lambda client: client.test_budget(budget)))


def _current_values(client: Client, reach: dict[str, str | None]) -> dict[str, Any]:
    """The current values of the budget with that scope. Without a currency, any matches if there is
    only one budget."""
    wanted = {key: value for key, value in reach.items() if value is not None}
    rows = client.budgets(customer=reach["customer"] or None)
    found = [row for row in rows if wanted.items() <= row.items()]
    if len(found) != 1:
        return {"currency": reach["currency"]}
    return {key: found[0][key] for key in ("currency", "hard", "alerts", "webhook")}


def _covers(row: dict[str, Any]) -> str:
    inside = "/".join(part for part in (row["app"], row["function"]) if part) or _EVERYTHING
    if customer := row["customer"]:
        whose = "each customer" if customer == ANY_CUSTOMER else f"customer {customer}"
        inside = whose if inside == _EVERYTHING else f"{inside} of {whose}"
    return f"{row['environment']}: {inside}" if row["environment"] else inside


def _about(amount: str) -> str:
    """Format a forecast with four significant digits; more would suggest false precision."""
    return format_money(Decimal(f"{Decimal(amount):.4g}"))


def _row(row: dict[str, Any]) -> dict[str, Any]:
    expected = row["forecast"] and _about(row["forecast"]["expected"])
    return {
        **row,
        "covers": _covers(row),
        "expected": expected,
        "stops": "refuses calls" if row["hard"] else "alerts",
    }


def _sentence(body: dict[str, Any]) -> str:
    verb = "set" if body["created"] else "changed"
    then = "calls are refused when it is spent" if body["hard"] else "it only sends alerts"
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
            f" ({_about(seen['low'])} to {_about(seen['high'])}, 80 % interval)"
            if seen["low"] is not None
            else ""
        )
        basis = f"{seen['basis_days']} full days" if seen["basis_days"] else "today so far"
        lines.append(f"expected  {_about(seen['expected'])} {currency}{band}, from {basis}")
        if seen["reached_at"] and not body["is_spent"]:
            lines.append(f"reached   {format_time(seen['reached_at'])} at this rate")
    lines.append(
        f"alerts    at {', '.join(f'{percent} %' for percent in body['alerts'])}; webhook "
        f"{body['webhook'] or 'none'}"
    )
    return Group(
        *(Text(line) for line in lines),
        format_table(
            [{**alert, "reached_at": alert["at"]} for alert in alerts],
            _ALERT_COLUMNS,
            empty="No alerts yet.",
        ),
    )


def show_example(session: Session, body: dict[str, Any]) -> None:
    """Show the response to a signed example, and what was sent; exit with 1 if it failed."""
    session.show(body, lambda: _example_report(body))
    if body["error"] is not None:
        raise typer.Exit(1)


def _example_report(body: dict[str, Any]) -> RenderableType:
    from rich.text import Text

    head = f"status {body['status']}" if body["status"] else "no response"
    end = "accepted" if body["error"] is None else body["error"]
    sent = "\n".join(f"{name}: {value}" for name, value in body["headers"].items())
    return Text(
        f"{head} after {body['elapsed_ms']} ms: {end}\n\nPOST "
        f"{body['url']}\n{sent}\n\n{json.dumps(json.loads(body['body']), indent=2)}"
    )
