"""Secrets: environment variables, sealed before they are stored or published
(`pilotlight.core.crypto`). No operation returns their values.

The sealed plaintext of a secret is a JSON object `{"VARIABLE": "value"}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import audit_trail, feed, tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity.tenants import require_environment
from pilotlight.controller.registry import feed_publisher
from pilotlight.core.crypto import PlatformKey
from pilotlight.errors import Conflict, InvalidInput, NotFound
from pilotlight.spec.identifiers import MAX_NAME_LENGTH
from pilotlight.spec.record_json import canonical_json
from snapshotter.types import VISIBLE_DEVICES

MAX_SECRET_BYTES = 65_536
"""Maximum size of one secret, all variables together: execve allows 128 KiB per string
(MAX_ARG_STRLEN), and secrets are part of the feed."""
MAX_SECRETS = 1000
"""Maximum number per tenant, over all environments: 64 MB, in the feed and in the database."""
_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?\Z")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def put(
    write: Write,
    *,
    key: PlatformKey,
    tenant: str,
    environment: str,
    name: str,
    variables: Mapping[str, str],
    actor: str,
    request: str = "",
) -> dict[str, Any]:
    """Create or replace a secret; returns its listing entry. Raises InvalidInput, NotFound,
    Conflict when the tenant has too many."""
    _check(name, variables)
    require_environment(write.sql, tenant=tenant, name=environment)
    table, names = tables.secrets, sorted(variables)
    _require_room(write.sql, tenant=tenant, environment=environment, name=name)
    sealed = key.activator.secrets.seal(canonical_json(dict(variables)).decode())
    row = {"sealed": sealed, "variables": json.dumps(names), "updated_at": write.now}
    insert = write.insert(table).values(
        tenant=tenant, environment=environment, name=name, created_at=write.now, **row
    )
    write.sql.execute(
        insert.on_conflict_do_update(index_elements=["tenant", "environment", "name"], set_=row)
    )
    feed.append(write, feed.SECRET, f"{tenant}/{environment}/{name}", sealed)
    for function in feed_publisher.functions_using_secret(
        write.sql, tenant=tenant, environment=environment, name=name
    ):
        feed_publisher.publish(write, function)  # launch specs contain the variables' names
    after = {"environment": environment, "variables": names}
    audit_trail.record(
        write,
        tenant=tenant,
        actor=actor,
        action="secret.put",
        subject=name,
        after=after,
        request=request,
    )
    return next(
        s for s in listing(write.sql, tenant=tenant, environment=environment) if s["name"] == name
    )


def delete(
    write: Write, *, tenant: str, environment: str, name: str, actor: str, request: str = ""
) -> None:
    """Delete a secret. Raises NotFound, or Conflict while a function's callable revision uses
    it."""
    table = tables.secrets
    which = (
        (table.c.tenant == tenant) & (table.c.environment == environment) & (table.c.name == name)
    )
    if write.sql.execute(sa.select(table.c.name).where(which)).first() is None:
        raise NotFound(f"there is no secret {name!r} in environment {environment!r}")
    users = sorted(
        feed_publisher.functions_using_secret(
            write.sql, tenant=tenant, environment=environment, name=name
        ).values()
    )
    if users:
        raise Conflict(
            f"secret {name!r} is used by {', '.join(users)}: deploy without it first",
            functions=users,
        )
    write.sql.execute(sa.delete(table).where(which))
    feed.append(write, feed.SECRET, f"{tenant}/{environment}/{name}", None)
    before = {"environment": environment}
    audit_trail.record(
        write,
        tenant=tenant,
        actor=actor,
        action="secret.delete",
        subject=name,
        before=before,
        request=request,
    )


def listing(sql: sa.Connection, *, tenant: str, environment: str) -> list[dict[str, Any]]:
    """Names and variables of an environment's secrets, without values."""
    table = tables.secrets
    columns = (table.c.name, table.c.variables, table.c.created_at, table.c.updated_at)
    query = (
        sa.select(*columns)
        .where(table.c.tenant == tenant, table.c.environment == environment)
        .order_by(table.c.name)
    )
    return [
        {**row, "variables": json.loads(row["variables"])} for row in sql.execute(query).mappings()
    ]


def _require_room(sql: sa.Connection, *, tenant: str, environment: str, name: str) -> None:
    table = tables.secrets
    same = (table.c.environment == environment) & (table.c.name == name)
    others = sa.select(sa.func.count()).where(table.c.tenant == tenant, ~same)
    if sql.execute(others).scalar_one() >= MAX_SECRETS:
        raise Conflict(
            f"this tenant has {MAX_SECRETS} secrets, which is the maximum",
            hint="Delete some, or put several variables into one secret.",
        )


def _check(name: str, variables: Mapping[str, str]) -> None:
    if len(name) > MAX_NAME_LENGTH or not _NAME.match(name):
        raise InvalidInput(
            f"secret name {name!r} is not valid: use letters, digits, '.', '-' or '_', starting "
            f"with a letter",
            parameter="name",
        )
    if not variables:
        raise InvalidInput(
            f"secret {name!r} has no variables: give at least one", parameter="values"
        )
    for variable, value in variables.items():
        if not _VARIABLE.match(variable) or "\0" in value:
            raise InvalidInput(
                f"secret {name!r}: {variable!r} cannot be an environment variable",
                parameter="values",
            )
        if variable == VISIBLE_DEVICES:
            raise InvalidInput(
                f"secret {name!r}: {variable}: the platform sets it to the GPUs that each instance "
                f"is granted: remove it",
                parameter="values",
            )
    if (size := sum(len(k) + len(v.encode()) for k, v in variables.items())) > MAX_SECRET_BYTES:
        raise InvalidInput(
            f"secret {name!r} has {size} bytes: the maximum is {MAX_SECRET_BYTES}",
            parameter="values",
        )
