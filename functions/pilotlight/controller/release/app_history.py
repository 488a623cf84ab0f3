"""The history of an app: one numbered entry per change of what serves its callers, including
rollbacks.

An app keeps its newest MAX_ENTRIES entries; a tenant's plan may limit the number over all its apps
further (`database/retention.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.errors import NotFound
from pilotlight.spec.record_json import canonical_json

ROLLBACK = "rollback"
"""The action of a rollback; other actions that roll back end in `.rollback`."""
MAX_ENTRIES = 1000
"""Entries of an app that are kept, and read to find what served before: a revision from more than a
thousand changes ago is not a rollback target."""


def next_version(write: Write, place: AppRef, *, stopped: bool | None = None) -> int:
    """Increment and return the app's version, the number of its next entry; create the app if there
    is none. `stopped` None: unchanged."""
    table = tables.apps
    row: dict[str, Any] = {"updated_at": write.now, "deleted_at": None}
    if stopped is not None:
        row["stopped"] = stopped
    first = {"stopped": False, **row, "version": 1, "created_at": write.now}
    insert = write.insert(table).values(
        tenant=place.tenant, environment=place.environment, name=place.app, **first
    )
    insert = insert.on_conflict_do_update(
        index_elements=["tenant", "environment", "name"],
        set_={**row, "version": table.c.version + 1},
    )
    return int(write.sql.execute(insert.returning(table.c.version)).scalar_one())


def record_version(
    write: Write,
    place: AppRef,
    *,
    version: int,
    action: str,
    functions: Sequence[Mapping[str, Any]],
    message: str = "",
    labels: Mapping[str, str] | None = None,
) -> None:
    """Write the entry `version`. `functions`: `{"function", "revision", "created", …}` of each
    function that it changed, as of after the change."""
    row = {
        "tenant": place.tenant,
        "environment": place.environment,
        "app": place.app,
        "version": version,
        "action": action,
    }
    texts = {
        "labels": canonical_json(dict(labels or {})).decode(),
        "functions": canonical_json(list(functions)).decode(),
    }
    table = tables.deployments
    write.sql.execute(
        sa.insert(table).values(
            **row, **texts, message=message, created_at=write.now, created_by=place.actor
        )
    )
    of_app = (
        table.c.tenant == place.tenant,
        table.c.environment == place.environment,
        table.c.app == place.app,
    )
    write.sql.execute(sa.delete(table).where(*of_app, table.c.version <= version - MAX_ENTRIES))


def entries(
    sql: sa.Connection, *, tenant: str, environment: str, app: str, limit: int
) -> list[dict[str, Any]]:
    """Return an app's entries, newest first, also for a deleted app. Raises NotFound."""
    table = tables.deployments
    query = sa.select(table).where(
        table.c.tenant == tenant, table.c.environment == environment, table.c.app == app
    )
    rows = sql.execute(query.order_by(table.c.version.desc()).limit(limit)).mappings().all()
    if not rows:
        raise NotFound(
            f"there is no app {app!r} in environment {environment!r}",
            app=app,
            environment=environment,
        )
    plain = ("version", "action", "created_at", "created_by", "message")
    return [
        {
            **{key: row[key] for key in plain},
            "labels": json.loads(row["labels"]),
            "functions": json.loads(row["functions"]),
        }
        for row in rows
    ]


def last_good_revision(changes: Iterable[tuple[str, str]], current: str) -> str | None:
    """Return the revision to roll back to from `current`; None if nothing served before. Pure.
    `changes`: (action, revision with the most traffic after it), oldest first.

    A revision that was rolled back is not a target until it is chosen again: two rollbacks go back
    two steps, and do not alternate between two revisions."""
    served: list[str] = []
    for action, revision in changes:
        if is_rollback(action) and revision in served:
            while served[-1] != revision:
                served.pop()
        elif not served or served[-1] != revision:
            served.append(revision)
    return next((revision for revision in reversed(served) if revision != current), None)


def is_rollback(action: str) -> bool:
    """Whether the action of an entry is a rollback."""
    return action.rpartition(".")[2] == ROLLBACK
