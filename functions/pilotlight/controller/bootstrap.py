"""The first tenant and the first key of a new platform. `pilotlight up` calls this before it starts the controller."""

from __future__ import annotations

import time
from pathlib import Path

from pilotlight.controller import access, keys, tenants
from pilotlight.controller.settings import ControllerConfig
from pilotlight.controller.store import Store
from pilotlight.types import Scope

ACTOR = "platform"


def first_admin_key(config: Path | None) -> str | None:
    """Make the tenant `default`, its environment `main` and an admin key, unless any key exists.

    Migrates the database first. Returns the key's text, which nobody can show again, or None when there was nothing to
    do. Of two at once, one makes it. Raises SettingsInvalid.
    """
    found = ControllerConfig.read(config)
    found.paths.make()
    store = Store(found.database_url, clock=time.time)
    try:
        store.migrate()
        return ensure_admin(store, uid_base=found.uid_base)
    finally:
        store.close()


def ensure_admin(store: Store, *, uid_base: int | None) -> str | None:
    """The same on an open, migrated store."""
    with store.write() as write:
        if uid_base is not None:
            tenants.give_uids(write, uid_base=uid_base)
        if keys.any_exists(write.sql):
            return None
        tenant = tenants.create(write, name=access.PLATFORM_TENANT, uid_base=uid_base, actor=ACTOR)
        return keys.create(write, tenant=tenant.id, scope=Scope.ADMIN, actor=ACTOR, name="first admin key").secret
