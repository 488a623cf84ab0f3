"""Tenants from the feed: their names and plans.

Owner: the event loop, through `RouteTable`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pilotlight.protocol import TenantRecord
from pilotlight.spec.identifiers import Priority
from pilotlight.spec.quotas import UNLIMITED, Plan


class Tenants:
    """Tenants by id and by name. Unknown tenants have no limits, because an older controller sends
    no plans."""

    def __init__(self) -> None:
        self._records: dict[str, TenantRecord] = {}
        self._plans: dict[str, Plan] = {}
        self._ids: dict[str, str] = {}

    def __repr__(self) -> str:
        return (
            f"<Tenants {len(self._records)}, "
            f"{sum(r.suspended for r in self._records.values())} suspended>"
        )

    def __len__(self) -> int:
        return len(self._records)

    def apply(self, tenant: str, value: Any) -> None:
        """Apply a tenant document; None = removed. Raises TypeError or ValueError, without
        changes."""
        record = TenantRecord(**value) if value is not None else None
        plan = Plan(**record.plan) if record is not None and record.plan else UNLIMITED
        old = self._records.pop(tenant, None)
        if old is not None and self._ids.get(old.name) == tenant:
            del self._ids[old.name]
        self._plans.pop(tenant, None)
        if record is not None:
            self._records[tenant] = record
            self._plans[tenant] = plan
            self._ids[record.name] = tenant

    def clear(self) -> None:
        """Remove all tenants."""
        self._records.clear()
        self._plans.clear()
        self._ids.clear()

    def plan_of(self, tenant: str) -> Plan:
        """Return the plan with the tenant's own overrides; UNLIMITED for an unknown tenant."""
        return self._plans.get(tenant, UNLIMITED)

    def named(self, name: str) -> str | None:
        """Return the id of the tenant of that name."""
        return self._ids.get(name)

    def name_of(self, tenant: str) -> str:
        """Return its name; "" when unknown."""
        record = self._records.get(tenant)
        return record.name if record is not None else ""

    def names(self) -> Mapping[str, str]:
        """Return all names by id."""
        return {tenant: record.name for tenant, record in self._records.items()}

    def is_suspended(self, tenant: str) -> bool:
        """Return whether its calls must be refused."""
        record = self._records.get(tenant)
        return record is not None and record.suspended

    def reserved(self) -> Mapping[str, int]:
        """Return the reserved bytes of a node's instance memory, by tenant id, for plans with a
        reservation."""
        return {
            tenant: plan.reserved_memory_bytes
            for tenant, plan in self._plans.items()
            if plan.reserved_memory_bytes
        }


def priority_of(asked: Priority | None, declared: Priority | None, *plans: Plan) -> Priority:
    """Return a call's priority: the requested one, else the function's, else STANDARD; limited by
    each plan."""
    priority = asked or declared or Priority.STANDARD
    for plan in plans:
        priority = priority.at_most(plan.priority)
    return priority
