"""Who asks, and what they may do. Pure: the key's row in, a `Principal` or an error out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import sqlalchemy as sa

from pilotlight.controller import tables
from pilotlight.errors import Forbidden, Unauthenticated
from pilotlight.types import DEFAULT_ENVIRONMENT, Scope

PLATFORM_TENANT = "default"
"""The tenant whose administrators run the platform: they may make tenants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """An authenticated caller.

    Attributes:
        tenant, tenant_name: whose key it is.
        uid: the tenant's uid on nodes; None = the platform's own.
        key: the key's id, which the audit log names.
        environment: the environment of this request.
        bound_environment: the only one that this key may touch, or None for all.
    """

    tenant: str
    tenant_name: str
    uid: int | None
    key: str
    scope: Scope
    environment: str
    bound_environment: str | None

    def demand(self, scope: Scope) -> None:
        """Raise Forbidden unless this key reaches `scope`."""
        if not self.scope.reaches(scope):
            raise Forbidden(f"this needs a key of scope '{scope}', and key {self.key} has '{self.scope}'", scope=scope.value)

    def demand_whole_tenant(self) -> None:
        """Raise Forbidden for a key that is bound to one environment."""
        if self.bound_environment is not None:
            raise Forbidden(f"key {self.key} is bound to environment {self.bound_environment!r}; this concerns the whole tenant")

    def demand_platform(self) -> None:
        """Raise Forbidden unless this is an administrator of the platform."""
        self.demand(Scope.ADMIN)
        self.demand_whole_tenant()
        if self.tenant_name != PLATFORM_TENANT:
            raise Forbidden("only an administrator of the platform (an admin key of the first tenant) may do this")


def hash_key(text: str) -> str:
    """How a key is stored: sha256 (hex). Its 256 random bits need no salt and no slow hash."""
    return hashlib.sha256(text.encode()).hexdigest()


def authenticate(sql: sa.Connection, *, authorization: str | None, environment: str | None, now: float) -> Principal:
    """The caller behind an Authorization header. Raises Unauthenticated, or Forbidden for an environment out of reach."""
    kind, _, text = (authorization or "").strip().partition(" ")
    if kind.lower() != "bearer" or not text:
        raise Unauthenticated("no API key: send the header 'Authorization: Bearer pl_…'")
    return find(sql, tables.api_keys.c.hash == hash_key(text.strip()), environment=environment, now=now)


def find(sql: sa.Connection, which: sa.ColumnElement[bool], *, environment: str | None, now: float) -> Principal:
    """The caller whose key's row matches `which`. Raises Unauthenticated when there is none, or it ran out or was revoked."""
    keys, tenants = tables.api_keys, tables.tenants
    query = sa.select(keys, tenants.c.name.label("tenant_name"), tenants.c.uid).join(tenants, keys.c.tenant == tenants.c.id)
    row = sql.execute(query.where(which)).first()
    if row is None or row.revoked_at is not None:
        raise Unauthenticated("this API key is not known, or was revoked")
    if row.expires_at is not None and row.expires_at <= now:
        raise Unauthenticated(f"API key {row.id} has expired")
    if row.environment is not None and environment not in (None, row.environment):
        raise Forbidden(f"key {row.id} is bound to environment {row.environment!r}, not {environment!r}")
    return Principal(
        tenant=row.tenant,
        tenant_name=row.tenant_name,
        uid=row.uid,
        key=row.id,
        scope=Scope(row.scope),
        environment=environment or row.environment or DEFAULT_ENVIRONMENT,
        bound_environment=row.environment,
    )
