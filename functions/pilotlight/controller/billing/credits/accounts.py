"""Credit accounts: what a customer was granted, what its usage drew from which grant, and what is
left.

A customer has one open account for each currency, from its first grant on. Its ledger
(`credit_entries`) is immutable: what was granted is reduced by a further entry. Usage draws on the
grant that expires first; what no grant covers is `debt`, which the next grant pays. For activators
an account is a hard budget without a period: `amount` is what was granted in all, less what was
withdrawn or has expired unused, and `spent` all that was drawn, so `amount - spent` is the balance.
`spent` never falls: a correction that credits usage is a grant."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import bulk, feed, tables
from pilotlight.controller.database.store import Write
from pilotlight.protocol import CREDIT_PERIOD, BudgetState, CreditRecord
from pilotlight.spec.pricing import parse_picos, picos_text

GRANT, WITHDRAWAL, REFUND, EXPIRY = "grant", "withdrawal", "refund", "expiry"
AccountKey = tuple[str, str, str]
"""Tenant, customer and currency."""
_A, _E, _G = tables.credit_accounts.c, tables.credit_entries.c, tables.credit_grants.c


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditEntry:
    """An entry of the ledger of credit.

    Attributes:
        number: its place in the ledger of its account, from 1.
        kind: GRANT, WITHDRAWAL, REFUND (a correction credited usage) or EXPIRY (what was unused).
        amount: picounits; negative for WITHDRAWAL and EXPIRY.
        grant: the one that it reduces; None for grants and refunds.
        reference: the tenant's own id of it, unique among its entries.
    """

    id: str
    account: str
    number: int
    tenant: str
    customer: str
    kind: str
    amount: int
    currency: str
    expires_at: float | None = None
    grant: str | None = None
    note: str = ""
    reference: str | None = None
    actor: str
    at: float

    def to_json(self) -> dict[str, Any]:
        """Return it for the audit log."""
        return {**asdict(self), "amount": picos_text(self.amount)}


@dataclass(slots=True, kw_only=True)
class CreditGrant:
    """A grant of which something is unused, or was before this transaction. Picounits; `amount` is
    without what was withdrawn."""

    id: str
    amount: int
    used: int = 0
    expires_at: float | None = None

    @property
    def unused(self) -> int:
        """What is left of it, also if it has expired."""
        return self.amount - self.used

    def is_valid_at(self, at: float) -> bool:
        """Whether it pays what begins at this time."""
        return self.expires_at is None or at < self.expires_at

    def draw(self, picos: int) -> int:
        """Use at most this much; return how much."""
        part = min(picos, self.unused)
        self.used += part
        return part


@dataclass(slots=True, kw_only=True)
class CreditAccount:
    """An account, as of this transaction. `grants` has the open ones, the first to expire first.
    Owner: the transaction."""

    id: str
    tenant: str
    customer: str
    currency: str
    opened_at: float
    closed_at: float | None = None
    version: int = 0
    granted: int = 0
    spent: int = 0
    debt: int = 0
    grants: list[CreditGrant] = field(default_factory=list)

    @property
    def key(self) -> AccountKey:
        """Whose it is."""
        return self.tenant, self.customer, self.currency

    def amount(self, now: float) -> int:
        """What was granted, less what was withdrawn or has expired unused."""
        expired = (one.unused for one in self.grants if not one.is_valid_at(now))
        return self.granted - sum(expired)

    def balance(self, now: float) -> int:
        """What is left; negative if more was used."""
        return self.amount(now) - self.spent

    def draw(self, picos: int, at: float) -> None:
        """Charge usage that began at this time."""
        self.spent += picos
        for grant in self.grants:
            if picos and grant.is_valid_at(at):
                picos -= grant.draw(picos)
        self.debt += picos

    def add(self, grant: CreditGrant) -> None:
        """Add a grant, which first pays the debt."""
        self.granted += grant.amount
        self.debt -= grant.draw(self.debt)
        self.grants.append(grant)
        self.grants.sort(key=_expiry)

    def reduce(self, grant: CreditGrant, picos: int) -> None:
        """Take this much of what is unused of a grant."""
        self.granted -= picos
        grant.amount -= picos

    def state(self, now: float, *, batch: int = 0) -> BudgetState:
        """Return it as activators read it. `batch`: what the records of a request cost it."""
        valid = (one for one in self.grants if one.unused and one.is_valid_at(now))
        return BudgetState(
            period=CREDIT_PERIOD,
            spent=picos_text(self.spent),
            batch=picos_text(batch),
            amount=picos_text(self.amount(now)),
            expiring=tuple(
                (one.expires_at, picos_text(one.unused))
                for one in valid
                if one.expires_at is not None
            ),
            version=self.version,
        )


def _expiry(grant: CreditGrant) -> float:
    return float("inf") if grant.expires_at is None else grant.expires_at


def open_accounts(
    sql: sa.Connection, *, tenants: Collection[str], customers: Collection[str]
) -> list[CreditAccount]:
    """Return the open accounts of customers with these ids, of these tenants."""
    of = (_A.closed_at.is_(None), _A.tenant.in_(tenants))
    parts = bulk.parts(sorted(customers))
    return [one for part in parts for one in select(sql, *of, _A.customer.in_(part))]


def find(sql: sa.Connection, key: AccountKey) -> CreditAccount | None:
    """Return the open account of a customer in a currency, or None."""
    tenant, customer, currency = key
    found = select(
        sql,
        _A.closed_at.is_(None),
        _A.tenant == tenant,
        _A.customer == customer,
        _A.currency == currency,
    )
    return found[0] if found else None


def select(
    sql: sa.Connection, *where: sa.ColumnElement[bool], limit: int | None = None
) -> list[CreditAccount]:
    """Return the accounts that match, with their open grants, by tenant and customer."""
    order = (_A.tenant, _A.customer, _A.opened_at)
    query = sa.select(tables.credit_accounts).where(*where).order_by(*order).limit(limit)
    accounts = {row["id"]: _account(row) for row in sql.execute(query).mappings()}
    for ids in bulk.parts(accounts):
        some = _G.account.in_(ids)
        grants = sa.select(tables.credit_grants).where(some, _G.is_open).order_by(_G.id)
        for row in sql.execute(grants).mappings():
            accounts[row["account"]].grants.append(_grant(row))
    for account in accounts.values():
        account.grants.sort(key=_expiry)
    return list(accounts.values())


def states(sql: sa.Connection, *, now: float, ids: Collection[str] = ()) -> dict[str, BudgetState]:
    """Return the state of these open accounts; () = of all."""
    named = [_A.id.in_(ids)] if ids else []
    found = select(sql, _A.closed_at.is_(None), *named)
    return {account.id: account.state(now) for account in found}


def create(write: Write, key: AccountKey, *, opened_at: float) -> CreditAccount:
    """Create an account."""
    tenant, customer, currency = key
    account = CreditAccount(
        id=f"ca-{secrets.token_hex(8)}",
        tenant=tenant,
        customer=customer,
        currency=currency,
        opened_at=opened_at,
    )
    row = {"tenant": tenant, "customer": customer, "currency": currency, "opened_at": opened_at}
    values = {**row, "id": account.id, **_mutable(account)}
    write.sql.execute(sa.insert(tables.credit_accounts).values(**values))
    return account


def append(
    write: Write, account: CreditAccount, *, kind: str, amount: int, actor: str, **more: Any
) -> CreditEntry:
    """Append an entry to an account's ledger; `more`: its other attributes. The caller stores the
    account."""
    account.version += 1
    entry = CreditEntry(
        id=f"cr-{secrets.token_hex(8)}",
        account=account.id,
        number=account.version,
        tenant=account.tenant,
        customer=account.customer,
        kind=kind,
        amount=amount,
        currency=account.currency,
        actor=actor,
        at=write.now,
        **more,
    )
    write.sql.execute(sa.insert(tables.credit_entries).values(**entry.to_json()))
    if kind in (GRANT, REFUND):
        account.add(CreditGrant(id=entry.id, amount=amount, expires_at=entry.expires_at))
        row = {"id": entry.id, "account": account.id, "tenant": account.tenant}
        row |= {"amount": picos_text(amount), "used": "0"}
        stored = {**row, "expires_at": entry.expires_at, "is_open": True}
        write.sql.execute(sa.insert(tables.credit_grants).values(**stored))
    return entry


def save(write: Write, account: CreditAccount) -> None:
    """Store an account and its grants. Grants of which nothing is unused are closed."""
    changed = sa.update(tables.credit_accounts).where(_A.id == account.id)
    write.sql.execute(changed.values(**_mutable(account)))
    rows = [
        {
            "of": grant.id,
            "amount": picos_text(grant.amount),
            "used": picos_text(grant.used),
            "is_open": grant.unused > 0,
        }
        for grant in account.grants
    ]
    if rows:
        names = ("amount", "used", "is_open")
        update = sa.update(tables.credit_grants).where(_G.id == sa.bindparam("of"))
        write.sql.execute(update.values({name: sa.bindparam(name) for name in names}), rows)


def publish(write: Write, account: CreditAccount) -> None:
    """Tell activators that credit was granted or withdrawn, or the account closed."""
    if account.closed_at is not None:
        feed.append(write, feed.CREDIT, account.id, None)
        return
    record = CreditRecord(
        id=account.id,
        tenant=account.tenant,
        environment="",
        app="",
        function="",
        period=CREDIT_PERIOD,
        amount=picos_text(max(0, account.balance(write.now))),
        currency=account.currency,
        customer=account.customer,
        opened_at=account.opened_at,
        version=account.version,
    )
    feed.append(write, feed.CREDIT, account.id, record.to_json())


def entries(
    sql: sa.Connection, *where: sa.ColumnElement[bool], limit: int | None = None
) -> list[CreditEntry]:
    """Return the entries that match, newest first."""
    order = (_E.at.desc(), _E.account, _E.number.desc())
    query = sa.select(tables.credit_entries).where(*where).order_by(*order).limit(limit)
    return [
        CreditEntry(**{**row, "amount": parse_picos(row["amount"])})
        for row in sql.execute(query).mappings()
    ]


def _mutable(account: CreditAccount) -> dict[str, Any]:
    return {
        "closed_at": account.closed_at,
        "version": account.version,
        **{name: picos_text(getattr(account, name)) for name in _AMOUNTS},
    }


_AMOUNTS = ("granted", "spent", "debt")


def _account(row: sa.RowMapping) -> CreditAccount:
    return CreditAccount(**{**row, **{name: parse_picos(row[name]) for name in _AMOUNTS}})


def _grant(row: sa.RowMapping) -> CreditGrant:
    return CreditGrant(
        id=row["id"],
        amount=parse_picos(row["amount"]),
        used=parse_picos(row["used"]),
        expires_at=row["expires_at"],
    )
