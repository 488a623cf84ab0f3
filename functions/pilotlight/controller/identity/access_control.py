"""Authentication and authorization: from an API key's row to a `Principal` or an error."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.errors import Forbidden, Unauthenticated
from pilotlight.protocol import HEADER_CUSTOMER
from pilotlight.spec.identifiers import DEFAULT_ENVIRONMENT, Scope, require_customer

SIGN_IN_ACTOR = "issuer:"
"""Begin of the maker of keys that were made for a sign-in by an issuer,
`issuer:<name>:<subject>`. They end with it, so they count for no administrator of the tenant."""
PLATFORM_TENANT = "default"
"""The tenant whose administrators operate the platform; they may create tenants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """An authenticated caller.

    Attributes:
        tenant, tenant_name: the tenant that owns the key.
        uid: the tenant's uid on nodes; None = the platform's own.
        key: the key's id, as the audit log records it.
        environment: the environment of this request.
        bound_environment: the only environment that this key may access; None = all.
        bound_app, bound_function: the only app, and its only function, that this key may access;
        None = all.
        bound_customer: the customer for which all calls of this key are made; None = its holder may
        name any.
        suspended: the tenant is suspended: its keys may read but not change anything.
        issuer: by which the person signed in for whom the key was made; None = it is no such key.
        expires_at: when the key ends, in seconds since the epoch; None = never.
    """

    tenant: str
    tenant_name: str
    uid: int | None
    key: str
    scope: Scope
    environment: str
    bound_environment: str | None
    bound_app: str | None = None
    bound_function: str | None = None
    bound_customer: str | None = None
    suspended: bool = False
    issuer: str | None = None
    expires_at: float | None = None

    def require_scope(self, scope: Scope) -> None:
        """Raise Forbidden unless this key's scope includes `scope`."""
        if not self.scope.reaches(scope):
            raise Forbidden(
                f"this request needs a key of scope '{scope}'; key {self.key} has '{self.scope}'",
                scope=scope.value,
            )

    def require_active(self) -> None:
        """Raise Forbidden if the tenant is suspended."""
        if self.suspended:
            raise Forbidden(
                f"tenant {self.tenant_name!r} is suspended: it can read but not change anything; "
                f"the platform's administrators can resume it"
            )

    def require_whole_tenant(self) -> None:
        """Raise Forbidden for a key that is bound to one environment, or to one app."""
        if self.bound_environment is not None:
            raise Forbidden(
                f"key {self.key} is bound to environment {self.bound_environment!r}; this "
                f"request affects the whole tenant"
            )
        self.require_whole_environment()

    def require_whole_environment(self) -> None:
        """Raise Forbidden for a key that is bound to one app: it may not change what several apps
        share."""
        if self.bound_app is not None:
            raise Forbidden(
                f"key {self.key} is bound to {self._bound_to()}; this request affects other apps too",
                app=self.bound_app,
            )

    def require_app(self, app: str) -> None:
        """Raise Forbidden unless this key may access all of `app`."""
        if self.bound_app not in (None, app) or self.bound_function is not None:
            raise Forbidden(
                f"key {self.key} is bound to {self._bound_to()}; this request is for app {app!r}",
                app=app,
            )

    def require_function(self, app: str, function: str) -> None:
        """Raise Forbidden unless this key may access `function` of `app`."""
        if not self.may_see(app, function):
            raise Forbidden(
                f"key {self.key} is bound to {self._bound_to()}, not {app}/{function}",
                app=app,
                function=function,
            )

    def may_see(self, app: str, function: str | None = None) -> bool:
        """Whether this key may access something of `app`, or its `function`. Lists omit what it may
        not."""
        return self.bound_app in (None, app) and (
            function is None or self.bound_function in (None, function)
        )

    def restrict(self, app: str | None, function: str | None) -> tuple[str | None, str | None]:
        """Restrict a filter (app, function), None = all, to what this key may access. Raises
        Forbidden when the filter names something else."""
        if self.bound_app is None:
            return app, function
        restricted = app or self.bound_app, function or self.bound_function
        if not self.may_see(restricted[0], restricted[1]):
            raise Forbidden(
                f"key {self.key} is bound to {self._bound_to()}, not "
                f"{'/'.join(part for part in restricted if part)}",
                app=restricted[0],
            )
        return restricted

    def covers(self, *, environment: str | None, app: str | None, function: str | None) -> bool:
        """Whether a key with these bounds (None = all) could access no more than this one."""
        pairs = (
            (self.bound_environment, environment),
            (self.bound_app, app),
            (self.bound_function, function),
        )
        return all(mine in (None, other) for mine, other in pairs)

    def customer_of(self, named: str | None) -> str:
        """Return the customer of what this key submits and `named` is for; "" = none. Raises
        InvalidInput, or Forbidden for another one than the key's own."""
        if named is not None:
            require_customer(named, parameter=HEADER_CUSTOMER)
        if self.bound_customer is not None and named not in (None, self.bound_customer):
            raise Forbidden(f"key {self.key} is for customer {self.bound_customer!r} only")
        return named or self.bound_customer or ""

    def require_platform(self) -> None:
        """Raise Forbidden unless the caller is a platform administrator."""
        self.require_scope(Scope.ADMIN)
        self.require_whole_tenant()
        if self.tenant_name != PLATFORM_TENANT:
            raise Forbidden(
                "only platform administrators (with an admin key of the first tenant) may do this"
            )

    def _bound_to(self) -> str:
        return (
            f"app {self.bound_app!r}"
            if self.bound_function is None
            else f"function {self.bound_app}/{self.bound_function}"
        )


def hash_key(text: str) -> str:
    """Return the sha256 (hex) under which a key is stored. Its 256 random bits need neither a salt
    nor a slow hash.

    Keys are compared only as hashes, in an index. The timing of that lookup could reveal leading
    bits of a stored hash to an attacker who tries many texts with chosen hashes. Even a complete
    hash does not reveal the key: inverting sha256 of 256 random bits is infeasible."""
    return hashlib.sha256(text.encode()).hexdigest()


def authenticate(
    sql: sa.Connection, *, authorization: str | None, environment: str | None, now: float
) -> Principal:
    """Return the caller of an Authorization header. Raises Unauthenticated, or Forbidden for an
    environment that the key may not access.

    Does the same work (one hash, one lookup) whether the key is valid, unknown, revoked or
    malformed."""
    kind, _, text = (authorization or "").strip().partition(" ")
    if kind.lower() != "bearer" or not text:
        raise Unauthenticated("no API key: send the header 'Authorization: Bearer pl_…'")
    return find_principal(
        sql, tables.api_keys.c.hash == hash_key(text.strip()), environment=environment, now=now
    )


def recheck(sql: sa.Connection, caller: Principal) -> None:
    """Check during a long request that its caller may still make it. Raises Unauthenticated when
    its key was revoked, Forbidden when its tenant is suspended.

    A key that expires meanwhile does not end the request."""
    keys, tenants = tables.api_keys, tables.tenants
    query = sa.select(keys.c.revoked_at, tenants.c.suspended_at, tenants.c.deleted_at)
    query = query.join(tenants, keys.c.tenant == tenants.c.id).where(keys.c.id == caller.key)
    row = sql.execute(query).first()
    if row is None or row.revoked_at is not None or row.deleted_at is not None:
        raise Unauthenticated(f"API key {caller.key} was revoked")
    replace(caller, suspended=row.suspended_at is not None).require_active()


def find_principal(
    sql: sa.Connection, which: sa.ColumnElement[bool], *, environment: str | None, now: float
) -> Principal:
    """Return the caller whose key's row matches `which`. Raises Unauthenticated when no key
    matches, or the key has expired or was revoked."""
    keys, tenants = tables.api_keys, tables.tenants
    columns = (
        tenants.c.name.label("tenant_name"),
        *(tenants.c[name] for name in ("uid", "suspended_at", "deleted_at")),
    )
    query = sa.select(keys, *columns).join(tenants, keys.c.tenant == tenants.c.id)
    row = sql.execute(query.where(which)).first()
    if row is None or row.revoked_at is not None or row.deleted_at is not None:
        raise Unauthenticated("this API key is unknown or was revoked")
    if row.expires_at is not None and row.expires_at <= now:
        if issuer_of(row.created_by) is not None:
            raise Unauthenticated(
                "this sign-in has ended: sign in again, on a command line with `pilotlight login "
                "--oidc`"
            )
        raise Unauthenticated(f"API key {row.id} has expired")
    if row.environment is not None and environment not in (None, row.environment):
        raise Forbidden(
            f"key {row.id} is bound to environment {row.environment!r}, not {environment!r}",
            environment=row.environment,
        )
    return Principal(
        tenant=row.tenant,
        tenant_name=row.tenant_name,
        uid=row.uid,
        key=row.id,
        scope=Scope(row.scope),
        environment=environment or row.environment or DEFAULT_ENVIRONMENT,
        bound_environment=row.environment,
        bound_app=row.app,
        bound_function=row.function,
        bound_customer=row.customer,
        suspended=row.suspended_at is not None,
        issuer=issuer_of(row.created_by),
        expires_at=row.expires_at,
    )


def issuer_of(created_by: str) -> str | None:
    """Return the issuer of a key's maker that signed in by one; None for other makers."""
    if not created_by.startswith(SIGN_IN_ACTOR):
        return None
    return created_by.removeprefix(SIGN_IN_ACTOR).partition(":")[0]
