"""`pilotlight customer …`: prepaid credit of your customers."""

from __future__ import annotations

import datetime as dt
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.core.command import Yes, command_group
from pilotlight.cli.core.formatting import (
    format_money,
    format_table,
    format_time,
    parse_duration_s,
)
from pilotlight.cli.core.session import Session
from pilotlight.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import RenderableType

_CREDITS = {
    "customer": "customer",
    "balance": "balance",
    "used": "used",
    "granted": "granted",
    "currency": "",
    "expires": "next to expire",
}
_GRANTS = {"id": "grant", "left": "left", "expires_at": "expires"}
_ENTRIES = {
    "made_at": "at",
    "id": "id",
    "kind": "kind",
    "amount": "amount",
    "currency": "",
    "expires_at": "expires",
    "grant": "of grant",
    "reference": "reference",
    "note": "note",
    "actor": "by",
}
_USES = {"day": "day", "what": "what", "used": "used", "currency": ""}

CustomerId = Annotated[str, typer.Argument(metavar="CUSTOMER", help="Id of the customer.")]
Currency = Annotated[str | None, typer.Option(help="Currency. Default: that of your price list.")]
Note = Annotated[str, typer.Option(help="Reason, kept with the entry.")]


def register(root: typer.Typer) -> None:
    """Add the command group."""
    group = command_group(root, "customer", "Manage what your customers have paid for.", {})
    command_group(
        group,
        "credit",
        "Grant prepaid credit to customers, and show what is left and what used it.",
        {
            "grant": grant,
            "withdraw": withdraw,
            "list": list_,
            "show": show,
            "entries": entries,
            "uses": uses,
            "close": close,
        },
    )


def grant(
    session: Session,
    *,
    customer: CustomerId,
    amount: Annotated[
        str, typer.Argument(metavar="AMOUNT", help="Amount to grant, such as 25 or 0.05.")
    ],
    expires: Annotated[
        str | None,
        typer.Option(
            metavar="WHEN", help="When it expires: in 90d or 12h, or a date. Default: never."
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Your own id of it, such as the payment's: what has one that was used before is "
            "not granted again.",
        ),
    ] = None,
    note: Note = "",
    currency: Currency = None,
) -> None:
    """Grant credit to a customer. Its calls are refused when all of it is used.

    Takes effect at once.
    """
    body = session.request(
        lambda client: client.grant_credit(
            customer,
            amount,
            currency=currency,
            expires_at=None if expires is None else _parse_expiry(expires, now=time.time()),
            note=note,
            reference=reference,
        )
    )
    session.show(body, lambda: _granted(customer, body))


def withdraw(
    session: Session,
    *,
    customer: CustomerId,
    grant: Annotated[
        str,
        typer.Argument(metavar="GRANT", help="Id of the grant, from `pilotlight customer credit`."),
    ],
    amount: Annotated[
        str | None, typer.Option(help="Amount to withdraw. Default: all that is left of the grant.")
    ] = None,
    note: Note = "",
) -> None:
    """Withdraw what is left of a grant, to correct it."""
    body = session.request(
        lambda client: client.withdraw_credit(customer, grant, amount=amount, note=note)
    )
    session.show(
        body,
        lambda: (
            f"{format_money(body['amount'].lstrip('-'), body['currency'])} of {grant} withdrawn as "
            f"{body['id']}; {_balance(customer, body)}"
        ),
    )


def list_(
    session: Session,
    after: Annotated[
        str | None, typer.Option(metavar="ID", help="Only customers after this one.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Number of customers.")] = 100,
) -> None:
    """List customers that have prepaid credit, with their balances."""
    rows = session.request(lambda client: client.credits(after=after, limit=limit))
    session.show(
        {"credits": rows},
        lambda: format_table(
            [_row(row) for row in rows], _CREDITS, empty="No customer has prepaid credit."
        ),
    )


def show(session: Session, customer: CustomerId) -> None:
    """Show a customer's balance, and what is left of each grant."""
    rows = session.request(lambda client: client.credit(customer))
    session.show({"credits": rows}, lambda: _details(customer, rows))


def entries(
    session: Session,
    *,
    customer: CustomerId,
    before: Annotated[
        str | None, typer.Option(metavar="ID", help="Only entries before this one.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Number of entries.")] = 100,
) -> None:
    """List the ledger of a customer's credit: grants, and what reduced them, newest first."""
    body = session.request(
        lambda client: client.credit_entries(customer, before=before, limit=limit)
    )
    rows = [
        {**row, "amount": format_money(row["amount"]), "made_at": row["at"]}
        for row in body["entries"]
    ]
    session.show(body, lambda: format_table(rows, _ENTRIES, empty="No credit was granted."))


def uses(
    session: Session,
    customer: CustomerId,
    month: Annotated[
        str | None, typer.Option(help="Invoice month, such as 2026-11. Default: this month.")
    ] = None,
) -> None:
    """Show what used a customer's credit, by day and function."""
    body = session.request(lambda client: client.credit_uses(customer, month=month))
    rows = [
        {
            **row,
            "used": format_money(row["used"]),
            "what": "/".join(part for part in (row["app"], row["function"]) if part),
        }
        for row in body["uses"]
    ]
    session.show(
        body, lambda: format_table(rows, _USES, empty=f"No credit was used in {body['month']}.")
    )


def close(
    session: Session, *, customer: CustomerId, currency: Currency = None, yes: Yes = False
) -> None:
    """Withdraw all that is left of a customer's credit, and no longer limit its calls by it."""
    session.confirm(
        f"Withdraw the credit of customer {customer}? Its calls will no longer be limited by it.",
        yes=yes,
    )
    session.request(lambda client: client.close_credit(customer, currency=currency))
    session.show(
        {"customer": customer, "closed": True},
        lambda: f"the credit of customer {customer} is closed",
    )


def _parse_expiry(text: str, *, now: float) -> float:
    """Parse a duration from `now`, or an ISO 8601 date or time (local unless it has an offset)."""
    try:
        return dt.datetime.fromisoformat(text).astimezone().timestamp()
    except ValueError:
        pass
    try:
        return now + parse_duration_s(text)
    except InvalidInput as e:
        raise InvalidInput(
            f"--expires {text}: neither a duration nor a date",
            hint="Write a duration from now, such as 90d, or a date, such as 2027-01-31.",
        ) from e


def _granted(customer: str, body: dict[str, Any]) -> str:
    if not body["created"]:
        return (
            f"reference {body['reference']} was used before, for {body['id']}: nothing changed; "
            f"{_balance(customer, body)}"
        )
    until = f" until {format_time(body['expires_at'])}" if body["expires_at"] else ""
    return (
        f"{format_money(body['amount'], body['currency'])} granted{until} as {body['id']}; "
        f"{_balance(customer, body)}"
    )


def _balance(customer: str, body: dict[str, Any]) -> str:
    return f"customer {customer} has {format_money(body['balance'], body['currency'])}"


def _row(row: dict[str, Any]) -> dict[str, Any]:
    amounts = {name: format_money(row[name]) for name in ("balance", "used", "granted")}
    first = row["grants"][0]["expires_at"] if row["grants"] else None
    return {**row, **amounts, "expires": first and format_time(first)}


def _details(customer: str, rows: list[dict[str, Any]]) -> RenderableType:
    from rich.console import Group

    if not rows:
        return f"Customer {customer} has no prepaid credit: its calls are not limited by any."
    parts: list[RenderableType] = []
    for row in rows:
        currency = row["currency"]
        parts.append(
            f"{customer}: {format_money(row['balance'], currency)} left, "
            f"{format_money(row['used'], currency)} used since {format_time(row['opened_at'])}"
        )
        grants = [{**one, "left": format_money(one["left"], currency)} for one in row["grants"]]
        parts.append(format_table(grants, _GRANTS, empty="Nothing is left of any grant."))
    return Group(*parts)
