"""Quotas of customers, which a tenant sets for one of its customers, or for each that has none of
its own. They apply in addition to all others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import audit_trail, feed, tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity import quotas
from pilotlight.errors import Conflict
from pilotlight.spec.identifiers import ANY_CUSTOMER, require_customer
from pilotlight.spec.record_json import canonical_json

MAX_CUSTOMERS = 1000
"""Customers of a tenant with quotas of their own: every activator has all of them."""
_TABLE = tables.customer_quotas
_C = _TABLE.c


def put(
    write: Write,
    *,
    tenant: str,
    customer: str,
    body: Mapping[str, Any],
    actor: str,
    request: str = "",
) -> dict[str, Any]:
    """Replace the quotas of a customer, or with ANY_CUSTOMER those of each without own ones; {}
    removes all. Raises InvalidInput, or Conflict when too many have some."""
    if customer != ANY_CUSTOMER:
        require_customer(customer)
    given, before = quotas.parse(body, of_key=True), get(write.sql, tenant, customer)
    if given == before:
        return given
    key = {"tenant": tenant, "customer": customer}
    if given:
        if not before and _count(write.sql, tenant) >= MAX_CUSTOMERS:
            raise Conflict(f"{MAX_CUSTOMERS} customers have quotas of their own: clear some first")
        row = {"quotas": canonical_json(given).decode(), "updated_at": write.now}
        insert = write.insert(_TABLE).values(**key, **row)
        write.sql.execute(insert.on_conflict_do_update(index_elements=list(key), set_=row))
    else:
        write.sql.execute(sa.delete(_TABLE).where(_C.tenant == tenant, _C.customer == customer))
    feed.append(write, feed.QUOTA, f"{tenant}/{customer}", given or None)
    audit_trail.record(
        write,
        tenant=tenant,
        actor=actor,
        action="quota.set",
        subject=f"customer {customer}",
        before=before,
        after=given,
        request=request,
    )
    return given


def get(sql: sa.Connection, tenant: str, customer: str) -> dict[str, Any]:
    """Return the quotas of a customer; {} if it has none of its own."""
    query = sa.select(_C.quotas).where(_C.tenant == tenant, _C.customer == customer)
    text = sql.execute(query).scalar()
    return {} if text is None else dict(json.loads(text))


def listing(sql: sa.Connection, tenant: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the customers with quotas of their own, and these, by id."""
    query = sa.select(_C.customer, _C.quotas).where(_C.tenant == tenant).order_by(_C.customer)
    return [(row.customer, json.loads(row.quotas)) for row in sql.execute(query)]


def _count(sql: sa.Connection, tenant: str) -> int:
    query = sa.select(sa.func.count()).select_from(_TABLE).where(_C.tenant == tenant)
    return int(sql.execute(query).scalar_one())
