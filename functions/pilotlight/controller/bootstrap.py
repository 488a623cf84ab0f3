"""Keys that nobody's key is needed for: whoever may write the platform's database is its operator.

`pilotlight up` makes the first tenant and the first key before it starts the controller;
`pilotlight token create --local` makes another when that key was lost. Both are writes like any
other, so a running controller does not mind; SIGHUP tells it to look."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from pilotlight.controller import access, database_file, keys, tables, tenants
from pilotlight.controller.plans import Terms
from pilotlight.controller.process_user import keep_root
from pilotlight.controller.settings import ControllerConfig
from pilotlight.controller.store import Store
from pilotlight.errors import Forbidden, NotFound
from pilotlight.quotas import BUILT_IN, Plan
from pilotlight.spec import from_json, to_json
from pilotlight.types import Scope

ACTOR = "platform"
"""Who the audit log names: the operator, by right of the files."""
PLATFORM_PLAN = "enterprise"
"""Of the first tenant: who has the platform alone is not bounded before anybody said so."""


def first_admin_key(config: Path | None) -> str | None:
    """Make the tenant `default`, its environment `main` and an admin key, unless any key exists.

    Migrates the database first. Returns the key's text, which nobody can show again, or None when
    there was nothing to do. Of two at once, one makes it. Raises SettingsInvalid."""
    found = ControllerConfig.read(config)
    home = found.paths.make().home
    database_file.settle(home)
    owner = database_file.owner_of(home)
    # the controller will find that it must keep root, too, and say why
    if owner is not None and owner.obstacle():
        keep_root(found)
        owner = None

    def make() -> str | None:
        with contextlib.closing(Store(found.database_url, clock=time.time)) as store:
            store.migrate()
            return ensure_admin(store, uid_base=found.uid_base, plans=found.plans)

    key: str | None = database_file.as_owner(owner if found.is_own_file else None, make)
    return key


def operator_key(
    config: Path | None,
    *,
    scope: Scope,
    name: str = "",
    environment: str | None = None,
    reach: keys.Reach = keys.EVERYTHING,
    expires_in_s: float | None = None,
) -> keys.NewKey:
    """Make another key of the first tenant.

    Raises Forbidden (another user's home), NotFound (no platform yet, no such environment),
    InvalidInput, SettingsInvalid."""
    found = ControllerConfig.read(config)
    home = found.paths.home
    if home.exists() and not os.access(home, os.R_OK | os.W_OK | os.X_OK):
        raise Forbidden(
            f"{home} is another user's: only its owner may make a key without having one"
        )
    nobody = NotFound(
        f"no platform has lived in {home} yet",
        hint="`pilotlight up` makes its first key; another home is named with --home.",
    )
    if found.settings.database_url is None and database_file.found_in(home) is None:
        raise nobody
    if found.is_own_file:
        database_file.settle(home)

    def make() -> Any:
        with contextlib.closing(Store(found.database_url, clock=time.time)) as store:
            store.migrate()
            with store.write() as write:
                query = sa.select(tables.tenants.c.id).where(
                    tables.tenants.c.name == access.PLATFORM_TENANT
                )
                tenant = write.sql.execute(query).scalar_one_or_none()
                if tenant is None:
                    raise nobody
                return to_json(
                    keys.create(
                        write,
                        tenant=tenant,
                        scope=scope,
                        actor=ACTOR,
                        name=name,
                        environment=environment,
                        reach=reach,
                        expires_in_s=expires_in_s,
                    )
                )

    return from_json(
        keys.NewKey,
        database_file.as_owner(database_file.owner_of(home) if found.is_own_file else None, make),
    )


def ensure_admin(
    store: Store, *, uid_base: int | None, plans: Mapping[str, Plan] = BUILT_IN
) -> str | None:
    """The same on an open, migrated store."""
    with store.write() as write:
        if uid_base is not None:
            tenants.give_uids(write, uid_base=uid_base, plans=plans)
        if keys.any_exists(write.sql):
            return None
        terms = Terms(plan=PLATFORM_PLAN, plans=plans)
        tenant = tenants.create(
            write, name=access.PLATFORM_TENANT, uid_base=uid_base, actor=ACTOR, terms=terms
        )
        return keys.create(
            write, tenant=tenant.id, scope=Scope.ADMIN, actor=ACTOR, name="first admin key"
        ).secret
