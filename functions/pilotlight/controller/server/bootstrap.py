"""Creates API keys without requiring one: a user who may write the platform's database is its
operator.

`pilotlight up` creates the first tenant and the first key before it starts the controller.
`pilotlight token create --local` creates another key if that one was lost. Both are ordinary writes
and safe while a controller runs; SIGHUP makes it read them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import audit_trail, sqlite_file, tables
from pilotlight.controller.database.store import Store
from pilotlight.controller.identity import access_control, api_keys, tenants
from pilotlight.controller.identity.tenant_plan import TenantPlan
from pilotlight.controller.server.process_user import restore_root_ownership
from pilotlight.controller.settings import ControllerConfig
from pilotlight.errors import Forbidden, NotFound
from pilotlight.spec.identifiers import Scope
from pilotlight.spec.quotas import BUILT_IN_PLANS, Plan
from pilotlight.spec.record_json import from_json, to_json

"""The actor in the audit log: the operator, who has access to the files."""
PLATFORM_PLAN = "enterprise"
"""The first tenant's plan: a platform with a single tenant has no limits by default."""


def first_admin_key(config: Path | None) -> str | None:
    """Create the tenant `default`, its environment `main` and an admin key, unless any key exists.

    Migrates the database first. Returns the key's text, which cannot be shown again, or None if a
    key exists. Of two concurrent calls, one creates the key. Raises SettingsInvalid."""
    loaded = ControllerConfig.read(config)
    home = loaded.paths.make().home
    sqlite_file.move_to_own_directory(home)
    owner = sqlite_file.database_owner(home)
    # the controller will come to the same result, stay root, and log the reason
    if owner is not None and owner.obstacle():
        restore_root_ownership(loaded)
        owner = None

    def create_key() -> str | None:
        with contextlib.closing(Store(loaded.database_url, clock=time.time)) as store:
            store.migrate()
            return ensure_admin(store, uid_base=loaded.uid_base, plans=loaded.plans)

    key: str | None = sqlite_file.run_as_owner(owner if loaded.is_own_file else None, create_key)
    return key


def operator_key(
    config: Path | None,
    *,
    scope: Scope,
    name: str = "",
    environment: str | None = None,
    reach: api_keys.KeyRestrictions = api_keys.UNRESTRICTED,
    expires_in_s: float | None = None,
) -> api_keys.NewKey:
    """Create another key of the first tenant.

    Raises Forbidden (another user's home), NotFound (no platform yet, no such environment),
    InvalidInput, SettingsInvalid."""
    loaded = ControllerConfig.read(config)
    home = loaded.paths.home
    if home.exists() and not os.access(home, os.R_OK | os.W_OK | os.X_OK):
        raise Forbidden(
            f"{home} belongs to another user: only its owner may create a key without an API key"
        )
    no_platform = NotFound(
        f"there is no platform in {home} yet",
        hint="`pilotlight up` creates its first key; name another home with --home.",
    )
    if loaded.settings.database_url is None and sqlite_file.find_database(home) is None:
        raise no_platform
    if loaded.is_own_file:
        sqlite_file.move_to_own_directory(home)

    def create_key() -> Any:
        with contextlib.closing(Store(loaded.database_url, clock=time.time)) as store:
            store.migrate()
            with store.write() as write:
                query = sa.select(tables.tenants.c.id).where(
                    tables.tenants.c.name == access_control.PLATFORM_TENANT
                )
                tenant = write.sql.execute(query).scalar_one_or_none()
                if tenant is None:
                    raise no_platform
                return to_json(
                    api_keys.create(
                        write,
                        tenant=tenant,
                        scope=scope,
                        actor=audit_trail.PLATFORM,
                        name=name,
                        environment=environment,
                        reach=reach,
                        expires_in_s=expires_in_s,
                    )
                )

    return from_json(
        api_keys.NewKey,
        sqlite_file.run_as_owner(
            sqlite_file.database_owner(home) if loaded.is_own_file else None, create_key
        ),
    )


def ensure_admin(
    store: Store, *, uid_base: int | None, plans: Mapping[str, Plan] = BUILT_IN_PLANS
) -> str | None:
    """Create the first tenant and admin key in an open, migrated store, unless any key exists.
    Returns the key's text, or None."""
    with store.write() as write:
        if uid_base is not None:
            tenants.assign_uids(write, uid_base=uid_base, plans=plans)
        if api_keys.any_exists(write.sql):
            return None
        terms = TenantPlan(plan=PLATFORM_PLAN, plans=plans)
        tenant = tenants.create(
            write,
            name=access_control.PLATFORM_TENANT,
            uid_base=uid_base,
            actor=audit_trail.PLATFORM,
            terms=terms,
        )
        return api_keys.create(
            write,
            tenant=tenant.id,
            scope=Scope.ADMIN,
            actor=audit_trail.PLATFORM,
            name="first admin key",
        ).secret
