"""Routes for prepaid credit of a tenant's customers: grants, withdrawals, balances, and what used
them."""

from __future__ import annotations

from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import Path, Query, Response
from pydantic import Field

from pilotlight.controller.api.account.billing import format_decimal
from pilotlight.controller.api.schemas import Body
from pilotlight.controller.billing import budget_periods
from pilotlight.controller.billing.budget_definition import parse_amount
from pilotlight.controller.billing.credits import accounts, consumption, definition, grants
from pilotlight.controller.billing.credits.accounts import CreditAccount, CreditEntry
from pilotlight.controller.billing.credits.definition import (
    MAX_NOTE_CHARS,
    MAX_REFERENCE_CHARS,
)
from pilotlight.controller.billing.invoices import month_ends_at
from pilotlight.controller.context import REQUIRE_DISK_SPACE, Admin, Biller, Context, Ctx, RequestId
from pilotlight.controller.database import tables
from pilotlight.controller.identity import tenants
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.identity.tenant_plan import tenant_plan_of
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.errors import InvalidInput
from pilotlight.spec.identifiers import MAX_CUSTOMER_LENGTH
from pilotlight.spec.pricing import COST_QUANTUM

router = APIRouter(prefix="/v1/credits", tags=["credits"])
CustomerId = Annotated[str, Path(max_length=MAX_CUSTOMER_LENGTH)]
Money = Annotated[str, Field(description="a decimal as a string")]
Currency = Annotated[
    str | None,
    Query(max_length=64, description="default: the currency of the tenant's price list"),
]
MAX_PAGE = 1000
_E = tables.credit_entries.c


class GrantRequest(Body):
    """Credit to grant."""

    amount: str = Field(max_length=64, description='a decimal number as a string: "25", "0.05"')
    currency: str | None = Field(
        default=None, max_length=64, description="null: the currency of the tenant's price list"
    )
    expires_at: float | None = Field(
        default=None, description="seconds since the epoch; null: it does not expire"
    )
    note: str = Field(default="", max_length=MAX_NOTE_CHARS)
    reference: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_REFERENCE_CHARS,
        description="your own id of this grant, such as that of the payment: a grant with one that "
        "was used before is not made again, however late it is repeated",
    )


class WithdrawalRequest(Body):
    """Credit to take back."""

    grant: str = Field(max_length=64, description="id of the grant")
    amount: str | None = Field(
        default=None, max_length=64, description="a decimal; null: all that is left of the grant"
    )
    note: str = Field(default="", max_length=MAX_NOTE_CHARS)


class EntryInfo(Body):
    """An entry of a customer's ledger of credit, which never changes."""

    id: str
    number: int = Field(description="its place in the customer's ledger of this currency")
    kind: str = Field(description="grant, withdrawal, refund (a corrected record), or expiry")
    amount: Money = Field(description="negative for withdrawals and expiry")
    currency: str
    expires_at: float | None
    grant: str | None = Field(description="the grant that it reduces")
    note: str
    reference: str | None
    actor: str = Field(description="id of the key, or `platform`")
    at: float


class EntryMade(EntryInfo):
    """An entry and the balance after it."""

    created: bool = Field(description="false: its reference was used before, and nothing changed")
    balance: Money


class GrantLeft(Body):
    """What is left of a grant."""

    id: str
    left: Money
    expires_at: float | None


class CreditInfo(Body):
    """The prepaid credit of a customer in a currency."""

    customer: str
    currency: str
    opened_at: float = Field(description="it pays for calls that begin from then on")
    balance: Money = Field(description="negative if calls used more than they had reserved")
    granted: Money = Field(description="less what was withdrawn, or has expired unused")
    used: Money
    grants: list[GrantLeft] = Field(description="those with something left, first to expire first")


class CreditList(Body):
    """Customers with prepaid credit, by id. Pass the last one as `after` for the next page."""

    credits: list[CreditInfo]


class EntryList(Body):
    """Entries, newest first. Pass `before` to request the next page; null: this is the last one."""

    entries: list[EntryInfo]
    before: str | None


class UseInfo(Body):
    """What calls of one function on one day (UTC) used; negative if corrections credited more."""

    day: str
    environment: str
    app: str
    function: str
    used: Money
    currency: str


class UseList(Body):
    """What used a customer's credit on the invoice of a month, newest day first."""

    month: str
    uses: list[UseInfo]


@router.get("")
def list_credits(
    context: Ctx,
    caller: Biller,
    after: Annotated[str, Query(max_length=MAX_CUSTOMER_LENGTH)] = "",
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
) -> CreditList:
    """List the customers that have prepaid credit."""
    caller.require_whole_tenant()
    c = tables.credit_accounts.c
    with context.store.read() as sql:
        found = accounts.select(
            sql,
            c.tenant == caller.tenant,
            c.closed_at.is_(None),
            c.customer > after,
            limit=limit,
        )
        if len(found) == limit:  # the last one may have more currencies
            last = found[-1].customer
            found = [one for one in found if one.customer != last]
            found += accounts.open_accounts(sql, tenants=[caller.tenant], customers=[last])
    return CreditList(credits=[_info(account, context.clock()) for account in found])


@router.get("/{customer}")
def get_credit(context: Ctx, caller: Biller, customer: CustomerId) -> CreditList:
    """Return a customer's prepaid credit, in each currency; none if it has none."""
    caller.require_whole_tenant()
    with context.store.read() as sql:
        found = accounts.open_accounts(sql, tenants=[caller.tenant], customers=[customer])
    return CreditList(credits=[_info(account, context.clock()) for account in found])


@router.get("/{customer}/entries")
def list_entries(
    context: Ctx,
    caller: Biller,
    customer: CustomerId,
    before: Annotated[
        str | None, Query(max_length=64, description="only entries before this one, by its id")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
) -> EntryList:
    """List every grant of a customer's credit, and what reduced them."""
    caller.require_whole_tenant()
    mine = [_E.tenant == caller.tenant, _E.customer == customer]
    with context.store.read() as sql:
        if before is not None:
            mine.append(_older_than(sql, before, *mine))
        found = accounts.entries(sql, *mine, limit=limit)
    last = found[-1].id if len(found) == limit else None
    return EntryList(entries=[EntryInfo(**_entry(one)) for one in found], before=last)


@router.get("/{customer}/uses")
def list_uses(
    context: Ctx,
    caller: Biller,
    customer: CustomerId,
    month: Annotated[
        str | None, Query(max_length=7, description="such as 2026-11; default: this month")
    ] = None,
) -> UseList:
    """List what used a customer's credit, by day and function."""
    caller.require_whole_tenant()
    today = budget_periods.day_of(context.clock())
    wanted = month or budget_periods.period_of(budget_periods.MONTH, today).name
    month_ends_at(wanted)
    with context.store.read() as sql:
        found = consumption.uses(sql, tenant=caller.tenant, customer=customer, month=wanted)
    return UseList(
        month=wanted,
        uses=[
            UseInfo(
                day=_date(one.day),
                environment=one.environment,
                app=one.app,
                function=one.function,
                used=_money(one.picos),
                currency=one.currency,
            )
            for one in found
        ],
    )


@router.post(
    "/{customer}/grants",
    status_code=201,
    dependencies=[REQUIRE_DISK_SPACE],
    responses={200: {"description": "The reference was used before: nothing changed."}},
)
def grant_credit(
    *,
    context: Ctx,
    caller: Admin,
    request: RequestId,
    customer: CustomerId,
    body: GrantRequest,
    response: Response,
) -> EntryMade:
    """Grant credit to a customer. From its first grant on, its calls (`Pilotlight-Customer`) are
    refused (402) when it is used up."""
    caller.require_whole_tenant()
    with context.store.write() as write:
        currency, currencies = _currencies(context, write.sql, caller)
        terms = definition.parse_grant(
            amount=body.amount,
            currency=currency if body.currency is None else body.currency,
            currencies=currencies,
            expires_at=body.expires_at,
            note=body.note,
            reference=body.reference,
            now=write.now,
        )
        entry, is_new = grants.grant(
            write,
            tenant=caller.tenant,
            customer=customer,
            terms=terms,
            actor=caller.key,
            request=request,
        )
        made = _made(write.sql, entry, created=is_new, now=write.now)
    response.status_code = 201 if is_new else 200
    return made


@router.post("/{customer}/withdrawals", status_code=201, dependencies=[REQUIRE_DISK_SPACE])
def withdraw_credit(
    *,
    context: Ctx,
    caller: Admin,
    request: RequestId,
    customer: CustomerId,
    body: WithdrawalRequest,
) -> EntryMade:
    """Withdraw what is left of a grant, or a part of it: the way to correct one."""
    caller.require_whole_tenant()
    amount = None if body.amount is None else parse_amount(body.amount)
    with context.store.write() as write:
        entry = grants.withdraw(
            write,
            tenant=caller.tenant,
            customer=customer,
            grant_id=body.grant,
            amount=amount,
            note=body.note,
            actor=caller.key,
            request=request,
        )
        return _made(write.sql, entry, created=True, now=write.now)


@router.delete("/{customer}", status_code=204)
def close_credit(
    context: Ctx,
    caller: Admin,
    request: RequestId,
    customer: CustomerId,
    currency: Currency = None,
) -> Response:
    """Close a customer's credit: what is left is withdrawn, and its calls are no longer limited by
    it. Its ledger stays."""
    caller.require_whole_tenant()
    with context.store.write() as write:
        own, _ = _currencies(context, write.sql, caller)
        grants.close(
            write,
            tenant=caller.tenant,
            customer=customer,
            currency=currency or own,
            actor=caller.key,
            request=request,
        )
    return Response(status_code=204)


def _currencies(context: Context, sql: sa.Connection, caller: Principal) -> tuple[str, set[str]]:
    """Return the currency of the tenant's price list, and all that there are."""
    lists = context.config.prices.lists()
    row = tenants.get(sql, tenant=caller.tenant)
    version = tenant_plan_of(row, context.config.plans).resolve().prices or ""
    own = lists.get(version, context.config.prices.rates())
    return own.currency, {rates.currency for rates in lists.values()}


def _older_than(
    sql: sa.Connection, entry: str, *mine: sa.ColumnElement[bool]
) -> sa.ColumnElement[bool]:
    known = accounts.entries(sql, *mine, _E.id == entry, limit=1)
    if not known:
        raise InvalidInput(f"before = {entry!r}: there is no such entry", parameter="before")
    (last,) = known
    at_once = (_E.account > last.account) | (
        (_E.account == last.account) & (_E.number < last.number)
    )
    return (_E.at < last.at) | ((_E.at == last.at) & at_once)


def _made(sql: sa.Connection, entry: CreditEntry, *, created: bool, now: float) -> EntryMade:
    account = accounts.find(sql, (entry.tenant, entry.customer, entry.currency))
    balance = account.balance(now) if account is not None else 0
    return EntryMade(**_entry(entry), created=created, balance=_money(balance))


def _info(account: CreditAccount, now: float) -> CreditInfo:
    return CreditInfo(
        customer=account.customer,
        currency=account.currency,
        opened_at=account.opened_at,
        balance=_money(account.balance(now)),
        granted=_money(account.amount(now)),
        used=_money(account.spent),
        grants=[
            GrantLeft(id=one.id, left=_money(one.unused), expires_at=one.expires_at)
            for one in account.grants
            if one.is_valid_at(now)
        ],
    )


def _entry(entry: CreditEntry) -> dict[str, Any]:
    shown = {name: getattr(entry, name) for name in EntryInfo.model_fields}
    return {**shown, "amount": _money(entry.amount)}


def _money(picos: int) -> str:
    return format_decimal(COST_QUANTUM * picos)


def _date(day: int) -> str:
    return budget_periods.date_of(day).isoformat()
