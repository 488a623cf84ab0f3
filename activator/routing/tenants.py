"""Tenants from the controller's feed: their names and plans, and which secrets a function gets.

A function gets the secrets that its spec names, of its own tenant and environment, and no others.
They are decrypted for each of its starts and kept sealed otherwise. The controller's API returns no
values (`controller.registry.secret_store`).

Owner: the event loop, through `RouteTable`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from activator.routing.call_target import CallTarget
from pilotlight import errors
from pilotlight.core.crypto import DecryptionFailed, Sealer
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

    def is_deleted(self, tenant: str) -> bool:
        """Return whether its keys are refused, and what runs for it must end."""
        record = self._records.get(tenant)
        return record is not None and record.deleted

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


class TenantSecrets:
    """Sealed secrets by `<tenant>/<environment>/<name>`. Owner: the event loop."""

    def __init__(self, sealer: Sealer) -> None:
        self._sealer = sealer
        self._sealed: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<TenantSecrets {len(self._sealed)}>"

    def put(self, path: str, sealed: str | None) -> None:
        """Apply a change of the feed; None: the secret was deleted."""
        if sealed is None:
            self._sealed.pop(path, None)
        else:
            self._sealed[path] = sealed

    def clear(self) -> None:
        """Remove all, before the feed starts again."""
        self._sealed.clear()

    def env_of(self, target: CallTarget) -> dict[str, str]:
        """Return a function's secrets as environment variables, for its next start. Raises
        Unavailable for one that is missing or cannot be decrypted."""
        values: dict[str, str] = {}
        for name in target.spec.secrets:
            sealed = self._sealed.get(f"{target.tenant}/{target.environment}/{name}")
            if sealed is None:
                raise errors.Unavailable(
                    f"secret {name!r} does not exist: `pilotlight secret set {name}` creates it",
                    retry_after_s=30,
                )
            try:
                values.update(json.loads(self._sealer.open(sealed)))
            except (DecryptionFailed, ValueError) as e:
                raise errors.Unavailable(
                    f"secret {name!r} cannot be decrypted: {e}: store its values again",
                    retry_after_s=30,
                ) from e
        return values
