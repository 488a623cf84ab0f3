"""Grants of credit, and what reduces them: withdrawals, expiry, and the end of an account."""

from __future__ import annotations

import math

import sqlalchemy as sa

from pilotlight.controller.billing.credits import accounts, consumption
from pilotlight.controller.billing.credits.accounts import (
    EXPIRY,
    GRANT,
    REFUND,
    WITHDRAWAL,
    AccountKey,
    CreditAccount,
    CreditEntry,
    CreditGrant,
)
from pilotlight.controller.billing.credits.definition import GrantDefinition
from pilotlight.controller.database import audit_trail, tables
from pilotlight.controller.database.store import Write
from pilotlight.errors import Conflict, InvalidInput, NotFound
from pilotlight.spec.identifiers import require_customer
from pilotlight.spec.pricing import picos_text

MAX_ACCOUNTS = 10_000
"""Open accounts of a tenant: every activator has all of them."""
MAX_OPEN_GRANTS = 100
"""Of an account, with something unused: every batch of records of its customer reads them."""
MAX_TENANT_GRANTS = 20_000
"""The same of all accounts of a tenant: activators read the state of all of them."""
LATE_S = 3 * 86_400.0
"""How long after its expiry a grant still pays for records of calls that began before it, and that
come late."""
LEAD_S = 1.0
"""An account begins this long before its first grant, so that it pays for calls of an activator
whose clock is behind."""
SETTLED_AT_ONCE = 500
"""Expired grants per transaction."""
_A, _E, _G = tables.credit_accounts.c, tables.credit_entries.c, tables.credit_grants.c


def grant(
    write: Write,
    *,
    tenant: str,
    customer: str,
    terms: GrantDefinition,
    actor: str,
    request: str = "",
) -> tuple[CreditEntry, bool]:
    """Grant credit to a customer; its first grant makes it prepaid. Returns the entry, and whether
    it is new: a reference that was used before returns its entry.

    Raises InvalidInput for an invalid customer; Conflict: the reference was used for something
    else, or there are too many prepaid customers or grants."""
    require_customer(customer)
    if terms.reference is not None:
        known = accounts.entries(
            write.sql, _E.tenant == tenant, _E.reference == terms.reference, limit=1
        )
        if known:
            _require_same(known[0], customer, terms)
            return known[0], False
    key = (tenant, customer, terms.currency)
    account = accounts.find(write.sql, key)
    is_new = account is None
    account = account or _open(write, key)
    if len(account.grants) >= MAX_OPEN_GRANTS:
        raise Conflict(
            f"customer {customer!r} has {MAX_OPEN_GRANTS} grants that are not used up: withdraw "
            f"some first"
        )
    _require_room(write, tenant)
    entry = accounts.append(
        write,
        account,
        kind=GRANT,
        amount=terms.picos,
        actor=actor,
        expires_at=terms.expires_at,
        note=terms.note,
        reference=terms.reference,
    )
    if is_new:
        consumption.catch_up(write, account)
    _finish(write, account, entry, action="credit.grant", request=request)
    return entry, True


def withdraw(
    write: Write,
    *,
    tenant: str,
    customer: str,
    grant_id: str,
    amount: int | None,
    note: str,
    actor: str,
    request: str = "",
) -> CreditEntry:
    """Withdraw this much (picounits; None: all) of what is unused of a grant. Calls that run may
    use some of it still: the balance is then negative until the next grant.

    Raises NotFound; Conflict: nothing of it is unused; InvalidInput: less is."""
    account, found = _grant_of(write, tenant, customer, grant_id)
    if found is None or not found.is_valid_at(write.now):
        raise Conflict(f"nothing of grant {grant_id} is left: it is used, withdrawn or expired")
    picos = found.unused if amount is None else amount
    if picos > found.unused:
        raise InvalidInput(
            f"amount: {picos_text(found.unused)} {account.currency} of grant {grant_id} are left",
            parameter="amount",
        )
    entry = _reduce(write, account, found, picos, kind=WITHDRAWAL, actor=actor, note=note.strip())
    _finish(write, account, entry, action="credit.withdraw", request=request)
    return entry


def close(
    write: Write, *, tenant: str, customer: str, currency: str, actor: str, request: str = ""
) -> CreditAccount:
    """End a customer's account: withdraw all that is left. Its calls are no longer limited by
    credit. Raises NotFound."""
    account = accounts.find(write.sql, (tenant, customer, currency))
    if account is None:
        raise NotFound(
            f"customer {customer!r} has no prepaid credit in {currency}",
            hint="`pilotlight customer credit list` shows the customers that have some.",
        )
    for found in [one for one in account.grants if one.unused]:
        kind = WITHDRAWAL if found.is_valid_at(write.now) else EXPIRY
        _reduce(write, account, found, found.unused, kind=kind, actor=actor, note="closed")
    account.closed_at = write.now
    accounts.save(write, account)
    accounts.publish(write, account)
    audit_trail.record(
        write,
        tenant=tenant,
        actor=actor,
        action="credit.close",
        subject=f"customer {customer}",
        after={"account": account.id, "balance": picos_text(account.balance(write.now))},
        request=request,
    )
    return account


def settle_expired(write: Write, *, limit: int = SETTLED_AT_ONCE) -> int:
    """Write off what is unused of grants that expired LATE_S ago; return the number of grants."""
    due = _G.is_open & (_G.expires_at < write.now - LATE_S)
    query = sa.select(_G.account, _G.id).where(due).order_by(_G.expires_at).limit(limit)
    found = {row.id: row.account for row in write.sql.execute(query)}
    for account in accounts.select(write.sql, _A.id.in_(sorted(set(found.values())))):
        for one in [one for one in account.grants if one.id in found]:
            _reduce(write, account, one, one.unused, kind=EXPIRY, actor=audit_trail.PLATFORM)
        accounts.save(write, account)
    return len(found)


def _open(write: Write, key: AccountKey) -> CreditAccount:
    tenant, customer, _ = key
    mine = (_A.tenant == tenant) & _A.closed_at.is_(None)
    count = sa.select(sa.func.count()).select_from(tables.credit_accounts).where(mine)
    if int(write.sql.execute(count).scalar_one()) >= MAX_ACCOUNTS:
        raise Conflict(
            f"{MAX_ACCOUNTS} customers have prepaid credit, which is the maximum: close the credit "
            f"of some first",
            customer=customer,
        )
    # whole milliseconds: activators compare it with the times of records, in microseconds
    opened_at = math.floor((write.now - LEAD_S) * 1000) / 1000
    closed = write.sql.execute(
        sa.select(sa.func.max(_A.closed_at)).where(_A.tenant == tenant, _A.customer == customer)
    ).scalar()
    if closed is not None:  # an earlier account has paid until then
        opened_at = max(opened_at, math.ceil(closed * 1000) / 1000)
    return accounts.create(write, key, opened_at=opened_at)


def _require_room(write: Write, tenant: str) -> None:
    mine = (_G.tenant == tenant) & _G.is_open
    count = sa.select(sa.func.count()).select_from(tables.credit_grants).where(mine)
    if int(write.sql.execute(count).scalar_one()) >= MAX_TENANT_GRANTS:
        raise Conflict(
            f"this tenant has {MAX_TENANT_GRANTS} grants of credit that are not used up, which is "
            f"the maximum"
        )


def _grant_of(
    write: Write, tenant: str, customer: str, grant_id: str
) -> tuple[CreditAccount, CreditGrant | None]:
    account_id = write.sql.execute(
        sa.select(_E.account).where(
            _E.id == grant_id,
            _E.tenant == tenant,
            _E.customer == customer,
            _E.kind.in_((GRANT, REFUND)),
        )
    ).scalar()
    if account_id is None:
        raise NotFound(
            f"customer {customer!r} has no grant {grant_id}",
            hint="`pilotlight customer credit show CUSTOMER` shows its grants.",
        )
    (account,) = accounts.select(write.sql, _A.id == account_id)
    return account, next((one for one in account.grants if one.id == grant_id), None)


def _reduce(
    write: Write,
    account: CreditAccount,
    grant: CreditGrant,
    picos: int,
    *,
    kind: str,
    actor: str,
    note: str = "",
) -> CreditEntry:
    account.reduce(grant, picos)
    return accounts.append(
        write, account, kind=kind, amount=-picos, actor=actor, grant=grant.id, note=note
    )


def _finish(
    write: Write, account: CreditAccount, entry: CreditEntry, *, action: str, request: str
) -> None:
    accounts.save(write, account)
    accounts.publish(write, account)
    audit_trail.record(
        write,
        tenant=account.tenant,
        actor=entry.actor,
        action=action,
        subject=f"customer {account.customer}",
        after=entry.to_json(),
        request=request,
    )


def _require_same(known: CreditEntry, customer: str, terms: GrantDefinition) -> None:
    same = (GRANT, customer, terms.currency, terms.picos)
    if (known.kind, known.customer, known.currency, known.amount) != same:
        raise Conflict(
            f"reference {terms.reference!r} was used for another entry: {known.kind} of "
            f"{picos_text(known.amount)} {known.currency} for customer {known.customer!r}"
        )
