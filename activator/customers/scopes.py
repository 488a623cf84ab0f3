"""Which customers have budgets, and which get some with their first call. Only those that have some
are known here, however many callers name. Owner: the event loop."""

from __future__ import annotations

from typing import Protocol

from pilotlight.protocol import BudgetRecord
from pilotlight.spec.identifiers import ANY_CUSTOMER

Scope = tuple[str, str, str, str, str]
"""Environment, app, function, period and currency of a budget."""


class Called(Protocol):
    """What is called (`budgets.Subject`)."""

    @property
    def tenant(self) -> str: ...
    @property
    def environment(self) -> str: ...
    @property
    def app(self) -> str: ...
    @property
    def function(self) -> str: ...
    @property
    def currency(self) -> str: ...


class CustomerScopes:
    """The scopes of the budgets of customers, soft ones included, and of those for ANY_CUSTOMER."""

    def __init__(self) -> None:
        self._records: dict[str, BudgetRecord] = {}
        self._scopes: dict[tuple[str, str], dict[str, Scope]] = {}
        """By tenant and customer, and by id."""
        self._tenants: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<CustomerScopes {len(self._records)} budgets, {len(self._scopes)} customers>"

    def apply(self, id: str, record: BudgetRecord | None) -> None:
        """Note a budget that is new or has changed; None = it was removed."""
        if (old := self._records.pop(id, None)) is not None:
            of = old.tenant, old.customer
            del self._scopes[of][id]
            if not self._scopes[of]:
                del self._scopes[of]
            self._tenants[old.tenant] -= 1
            if not self._tenants[old.tenant]:
                del self._tenants[old.tenant]
        if record is not None and record.customer:
            self._records[id] = record
            self._scopes.setdefault((record.tenant, record.customer), {})[id] = _scope_of(record)
            self._tenants[record.tenant] = self._tenants.get(record.tenant, 0) + 1

    def has(self, tenant: str) -> bool:
        """Whether the tenant has budgets for customers."""
        return tenant in self._tenants

    def lacks(self, called: Called, customer: str) -> bool:
        """Whether a call for this customer falls under a budget for ANY_CUSTOMER whose scope the
        customer has no budget for."""
        defaults = self._scopes.get((called.tenant, ANY_CUSTOMER))
        if defaults is None:
            return False
        own = set(self._scopes.get((called.tenant, customer), {}).values())
        return any(scope not in own and _covers(scope, called) for scope in defaults.values())


def _scope_of(record: BudgetRecord) -> Scope:
    return (record.environment, record.app, record.function, record.period, record.currency)


def _covers(scope: Scope, called: Called) -> bool:
    environment, app, function, _, currency = scope
    return (
        environment in ("", called.environment)
        and app in ("", called.app)
        and function in ("", called.function)
        and currency == called.currency
    )
