"""The inputs for fair shares of starts: the plans of tenants, and the quotas of functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from pilotlight.spec.identifiers import Isolation
from pilotlight.spec.quotas import UNLIMITED, Plan, Quotas
from snapshotter.types import TenantShare


class SharePolicy(Protocol):
    """The part of the routing table that starts need. Nothing here raises: unknown names are
    unlimited."""

    def plan_of(self, tenant: str) -> Plan:
        """A tenant's plan, including its overrides."""

    def quotas_of(self, name: str) -> Quotas:
        """A function's own quotas, by `<tenant>/<environment>/<app>/<function>`."""

    def reserved(self) -> Mapping[str, int]:
        """Bytes of a node's instance memory that are reserved, by tenant."""

    def tenant_name(self, tenant: str) -> str:
        """A tenant's name; "" when unknown."""


class UnlimitedShares:
    """The policy of a platform without plans."""

    def plan_of(self, tenant: str) -> Plan:
        """Return the unlimited plan."""
        return UNLIMITED

    def quotas_of(self, name: str) -> Quotas:
        """Return unlimited quotas."""
        return UNLIMITED

    def reserved(self) -> Mapping[str, int]:
        """Return no reservations."""
        return {}

    def tenant_name(self, tenant: str) -> str:
        """Return "": no names are known."""
        return ""


def share_of(terms: SharePolicy, tenant: str) -> TenantShare:
    """The share of a start's tenant, as sent to the node agent."""
    plan = terms.plan_of(tenant)
    return TenantShare(
        tenant=tenant,
        name=terms.tenant_name(tenant),
        weight=plan.weight,
        is_dedicated=plan.isolation is Isolation.DEDICATED,
        reserved=dict(terms.reserved()),
        log_bytes=plan.log_bytes,
    )
