"""Quotas of functions and keys, which a tenant sets for its own. They apply in addition to the
tenant's, so they can only restrict further."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import audit_trail, feed, tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity.tenants import require_environment
from pilotlight.errors import InvalidInput
from pilotlight.spec.identifiers import require_name
from pilotlight.spec.quotas import parse_quotas
from pilotlight.spec.record_json import canonical_json

NOT_OF_KEYS = frozenset({"instances", "gpus"})
"""An instance serves every key of its function, so these quotas cannot apply to a key."""
_TABLE = tables.function_quotas


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionRef:
    """The function that quotas apply to, by name, deployed or not."""

    tenant: str
    environment: str
    app: str
    function: str

    @property
    def key(self) -> str:
        """The function's key in the feed."""
        return f"{self.tenant}/{self.environment}/{self.app}/{self.function}"


def parse(body: Mapping[str, Any], *, of_key: bool = False) -> dict[str, Any]:
    """Validate quotas of a function, or with `of_key` of a key or customer; omit unset ones. Raises
    InvalidInput naming key, value and limit."""
    try:
        quotas = parse_quotas(body)
    except ValueError as e:
        raise InvalidInput(str(e), parameter="quotas") from e
    given = {key: value for key in body if (value := getattr(quotas, key)) is not None}
    if wrong := sorted(NOT_OF_KEYS & set(given) if of_key else ()):
        raise InvalidInput(
            f"{wrong[0]} = {given[wrong[0]]!r}: limits a tenant or a function, not a key or "
            f"customer",
            parameter="quotas",
        )
    return given


def put(
    write: Write, function: FunctionRef, body: Mapping[str, Any], *, actor: str, request: str = ""
) -> dict[str, Any]:
    """Replace the function's quotas; {} removes all. Raises InvalidInput, or NotFound for an
    environment that does not exist."""
    require_environment(write.sql, tenant=function.tenant, name=function.environment)
    for kind, name in (("app", function.app), ("function", function.function)):
        require_name(kind, name)
    quotas, before = parse(body), get(write.sql, function)
    if quotas == before:
        return quotas
    if quotas:
        row = {"quotas": canonical_json(quotas).decode(), "updated_at": write.now}
        insert = write.insert(_TABLE).values(**_names(function), **row)
        write.sql.execute(
            insert.on_conflict_do_update(index_elements=list(_names(function)), set_=row)
        )
    else:
        write.sql.execute(sa.delete(_TABLE).where(*_is(function)))
    feed.append(write, feed.QUOTA, function.key, quotas or None)
    subject = f"{function.environment}/{function.app}/{function.function}"
    audit_trail.record(
        write,
        tenant=function.tenant,
        actor=actor,
        action="quota.set",
        subject=subject,
        before=before,
        after=quotas,
        request=request,
    )
    return quotas


def get(sql: sa.Connection, function: FunctionRef) -> dict[str, Any]:
    """Return a function's quotas; {} if it has none."""
    text = sql.execute(sa.select(_TABLE.c.quotas).where(*_is(function))).scalar()
    return {} if text is None else dict(json.loads(text))


def listing(sql: sa.Connection, *, tenant: str, environment: str) -> list[dict[str, Any]]:
    """Return the functions of an environment that have quotas, by name."""
    columns = (_TABLE.c.app, _TABLE.c.function, _TABLE.c.quotas, _TABLE.c.updated_at)
    query = sa.select(*columns).where(
        _TABLE.c.tenant == tenant, _TABLE.c.environment == environment
    )
    rows = sql.execute(query.order_by(_TABLE.c.app, _TABLE.c.function)).mappings()
    return [{**row, "quotas": json.loads(row["quotas"])} for row in rows]


def _names(function: FunctionRef) -> dict[str, str]:
    return {name: getattr(function, name) for name in ("tenant", "environment", "app", "function")}


def _is(function: FunctionRef) -> list[sa.ColumnElement[bool]]:
    return [_TABLE.c[name] == value for name, value in _names(function).items()]
