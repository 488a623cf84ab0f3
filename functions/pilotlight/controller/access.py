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
        tenant, tenant_name: whose key it is. uid: the tenant's uid on nodes; None = the platform's
        own. key: the key's id, which the audit log names. environment: the environment of this
        request. bound_environment: the only one that this key may touch, or None for all.
        bound_app, bound_function: the only app that it may touch, and the only function of it; None
        = all. suspended: the tenant is: its keys may look, and change nothing.
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
    suspended: bool = False

    def demand(self, scope: Scope) -> None:
        """Raise Forbidden unless this key reaches `scope`."""
        if not self.scope.reaches(scope):
            raise Forbidden(
                f"this needs a key of scope '{scope}', and key {self.key} has '{self.scope}'",
                scope=scope.value,
            )

    def demand_whole_tenant(self) -> None:
        """Raise Forbidden for a key that is bound to one environment, or to one app."""
        if self.bound_environment is not None:
            raise Forbidden(
                f"key {self.key} is bound to environment {self.bound_environment!r}; this "
                f"concerns the whole tenant"
            )
        self.demand_whole_environment()

    def demand_whole_environment(self) -> None:
        """Raise Forbidden for a key that is bound to one app: what several apps share is not its to
        change."""
        if self.bound_app is not None:
            raise Forbidden(
                f"key {self.key} is bound to {self._bound()}; this concerns other apps too",
                app=self.bound_app,
            )

    def demand_app(self, app: str) -> None:
        """Raise Forbidden unless this key reaches all of `app`."""
        if self.bound_app not in (None, app) or self.bound_function is not None:
            raise Forbidden(
                f"key {self.key} is bound to {self._bound()}; this concerns app {app!r}", app=app
            )

    def demand_function(self, app: str, function: str) -> None:
        """Raise Forbidden unless this key reaches `function` of `app`."""
        if not self.may_see(app, function):
            raise Forbidden(
                f"key {self.key} is bound to {self._bound()}, not {app}/{function}",
                app=app,
                function=function,
            )

    def may_see(self, app: str, function: str | None = None) -> bool:
        """Whether something of `app`, or of its `function`, is within reach; lists leave out what
        is not."""
        return self.bound_app in (None, app) and (
            function is None or self.bound_function in (None, function)
        )

    def narrowed(self, app: str | None, function: str | None) -> tuple[str | None, str | None]:
        """What a question about (app, function), None = all, means for this key. Raises Forbidden
        when it asks for what is out of reach."""
        if self.bound_app is None:
            return app, function
        wanted = app or self.bound_app, function or self.bound_function
        if not self.may_see(wanted[0], wanted[1]):
            raise Forbidden(
                f"key {self.key} is bound to {self._bound()}, not "
                f"{'/'.join(part for part in wanted if part)}",
                app=wanted[0],
            )
        return wanted

    def covers(self, *, environment: str | None, app: str | None, function: str | None) -> bool:
        """Whether a key of this reach (None = all) reaches nothing that this one does not."""
        pairs = (
            (self.bound_environment, environment),
            (self.bound_app, app),
            (self.bound_function, function),
        )
        return all(mine in (None, other) for mine, other in pairs)

    def demand_platform(self) -> None:
        """Raise Forbidden unless this is an administrator of the platform."""
        self.demand(Scope.ADMIN)
        self.demand_whole_tenant()
        if self.tenant_name != PLATFORM_TENANT:
            raise Forbidden(
                "only an administrator of the platform (an admin key of the first tenant) may do this"
            )

    def _bound(self) -> str:
        return (
            f"app {self.bound_app!r}"
            if self.bound_function is None
            else f"function {self.bound_app}/{self.bound_function}"
        )


def hash_key(text: str) -> str:
    """How a key is stored: sha256 (hex). Its 256 random bits need no salt and no slow hash.

    Only hashes are ever compared, and by an index. Its time could tell leading bits of a stored
    hash, to whom makes many texts with chosen ones; from a whole hash no text follows, since nobody
    inverts sha256 of 256 random bits."""
    return hashlib.sha256(text.encode()).hexdigest()


def authenticate(
    sql: sa.Connection, *, authorization: str | None, environment: str | None, now: float
) -> Principal:
    """The caller behind an Authorization header. Raises Unauthenticated, or Forbidden for an
    environment out of reach.

    The same work (one hash, one look-up) whether the key is good, unknown, revoked or not of our
    form."""
    kind, _, text = (authorization or "").strip().partition(" ")
    if kind.lower() != "bearer" or not text:
        raise Unauthenticated("no API key: send the header 'Authorization: Bearer pl_…'")
    return find(
        sql, tables.api_keys.c.hash == hash_key(text.strip()), environment=environment, now=now
    )


def find(
    sql: sa.Connection, which: sa.ColumnElement[bool], *, environment: str | None, now: float
) -> Principal:
    """The caller whose key's row matches `which`. Raises Unauthenticated when there is none, or it
    ran out or was revoked."""
    keys, tenants = tables.api_keys, tables.tenants
    columns = (tenants.c.name.label("tenant_name"), tenants.c.uid, tenants.c.suspended_at)
    query = sa.select(keys, *columns).join(tenants, keys.c.tenant == tenants.c.id)
    row = sql.execute(query.where(which)).first()
    if row is None or row.revoked_at is not None:
        raise Unauthenticated("this API key is not known, or was revoked")
    if row.expires_at is not None and row.expires_at <= now:
        raise Unauthenticated(f"API key {row.id} has expired")
    if row.environment is not None and environment not in (None, row.environment):
        raise Forbidden(
            f"key {row.id} is bound to environment {row.environment!r}, not {environment!r}"
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
        suspended=row.suspended_at is not None,
    )
