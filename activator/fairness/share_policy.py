"""What the fair shares of starts are made of: the plans of tenants, and the quotas of functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from pilotlight.quotas import UNLIMITED, Plan, Quotas
from pilotlight.types import Isolation
from snapshotter.types import Share


class SharePolicy(Protocol):
    """The part of the routes that starts need. Nothing here raises: who is unknown is unbounded."""

    def plan_of(self, tenant: str) -> Plan:
        """A tenant's plan, its overrides included."""
        ...

    def quotas_of(self, name: str) -> Quotas:
        """A function's own quotas, by `<tenant>/<environment>/<app>/<function>`."""
        ...

    def reserved(self) -> Mapping[str, int]:
        """Bytes of a node's instance memory that are kept free, by tenant."""
        ...

    def tenant_name(self, tenant: str) -> str:
        """A tenant's name; "" when unknown."""
        ...


class UnlimitedShares:
    """Terms of a platform that says nothing."""

    def plan_of(self, tenant: str) -> Plan:
        """See Terms."""
        return UNLIMITED

    def quotas_of(self, name: str) -> Quotas:
        """See Terms."""
        return UNLIMITED

    def reserved(self) -> Mapping[str, int]:
        """See Terms."""
        return {}

    def tenant_name(self, tenant: str) -> str:
        """See Terms."""
        return ""


def share_of(terms: SharePolicy, tenant: str) -> Share:
    """What the node agent is told of a start's tenant."""
    plan = terms.plan_of(tenant)
    return Share(
        tenant=tenant,
        name=terms.tenant_name(tenant),
        weight=plan.weight,
        is_dedicated=plan.isolation is Isolation.DEDICATED,
        reserved=dict(terms.reserved()),
        log_bytes=plan.log_bytes,
    )
