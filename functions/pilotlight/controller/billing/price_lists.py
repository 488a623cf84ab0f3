"""All price lists that were ever in effect, by version. A record names the version that priced it,
so a version is immutable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity.tenant_plan import tenant_plan_of
from pilotlight.controller.settings import ControllerConfig
from pilotlight.core.settings import SettingsInvalid
from pilotlight.spec.pricing import Rates
from pilotlight.spec.record_json import canonical_json

_WORDS = frozenset({"version", "currency"})


def record_price_lists(write: Write, lists: Mapping[str, Rates]) -> list[str]:
    """Record the price lists of platform.yaml; return the versions that are new.

    Raises SettingsInvalid if a known version now has different prices.
    """
    known = {row["version"]: row["document"] for row in _rows(write.sql)}
    for version, rates in lists.items():
        if version in known:
            _require_same(version, before=_document(known[version]), now=rates.to_json())
    fresh = [version for version in lists if version not in known]
    for version in fresh:
        document = canonical_json(lists[version].to_json()).decode()
        write.sql.execute(
            sa.insert(tables.prices).values(
                version=version, document=document, first_seen_at=write.now
            )
        )
    return fresh


def listing(sql: sa.Connection) -> list[dict[str, Any]]:
    """Return all price lists ever recorded, with `first_seen_at`, newest first."""
    rows = sorted(_rows(sql), key=lambda row: (-row["first_seen_at"], row["version"]))
    return [{**_document(row["document"]), "first_seen_at": row["first_seen_at"]} for row in rows]


def of_tenants(sql: sa.Connection, config: ControllerConfig) -> Mapping[str, Rates]:
    """Return the price list in effect for each tenant, by id. If platform.yaml no longer has a
    tenant's list, it is the platform's own, as for activators."""
    lists, own = config.prices.lists(), config.prices.rates()
    rows = sql.execute(sa.select(tables.tenants)).all()
    versions = {row.id: tenant_plan_of(row, config.plans).resolve().prices for row in rows}
    return {
        tenant: own if version is None else lists.get(version, own)
        for tenant, version in versions.items()
    }


def of_tenant(sql: sa.Connection, config: ControllerConfig, tenant: str) -> Rates:
    """Return the price list in effect for one tenant, by id."""
    return of_tenants(sql, config).get(tenant, config.prices.rates())


def used(sql: sa.Connection, *, tenant: str) -> set[str]:
    """Return the versions that priced a record of this tenant."""
    table = tables.usage_days
    return set(
        sql.execute(
            sa.select(table.c.price_version).distinct().where(table.c.tenant == tenant)
        ).scalars()
    )


def _rows(sql: sa.Connection) -> list[sa.RowMapping]:
    return list(sql.execute(sa.select(tables.prices)).mappings())


def _document(text: str) -> dict[str, Any]:
    """Parse a stored list; keys that did not exist when it was stored have their defaults."""
    body = json.loads(text)
    return {**Rates(version=body["version"]).to_json(), **body}


def _require_same(version: str, *, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for key, value in now.items():
        if _plain(key, before[key]) != _plain(key, value):
            raise SettingsInvalid(
                f"prices: {key} = {value!r} in version {version!r}, which was in effect with "
                f"{before[key]!r} and is named in records: give the changed prices a new version"
            )


def _plain(key: str, value: Any) -> Any:
    """Normalize a price: "0.10" equals "0.1"."""
    if isinstance(value, Mapping):
        return {name: Decimal(rate) for name, rate in value.items()}
    return value if key in _WORDS else Decimal(value)
