"""Release approvals: an app's approval policy, the approvals of its revisions, and the check before
a revision takes traffic.

A key counts once per revision, and not at all for a revision that it deployed itself. Keys are
created by administrators, so a user who may only deploy cannot approve their own revision. A
revision that has served before needs no approval, so a rollback never waits for one."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import audit_trail, tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.errors import ApprovalRequired, Conflict, NotFound
from pilotlight.spec.bound import is_bound
from pilotlight.spec.record_json import canonical_json

MAX_APPROVALS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalPolicy:
    """An app's release policy. `approvals`: how many keys must approve a new revision before it
    takes traffic."""

    approvals: int = 0


def policy(sql: sa.Connection, place: AppRef) -> ApprovalPolicy:
    """Return the app's policy; the default if the app does not exist yet."""
    text = sql.execute(sa.select(tables.apps.c.policy).where(*place.is_app())).scalar()
    return ApprovalPolicy(**json.loads(text)) if text else ApprovalPolicy()


def set_policy(write: Write, place: AppRef, *, approvals: int) -> ApprovalPolicy:
    """Set how many approvals the app's releases require, 0 = none. Revisions that serve are not
    affected. Raises NotFound."""
    before, after = policy(write.sql, place), ApprovalPolicy(approvals=approvals)
    text = canonical_json({"approvals": approvals}).decode()
    changed = write.sql.execute(
        sa.update(tables.apps)
        .where(*place.is_app(), tables.apps.c.deleted_at.is_(None))
        .values(policy=text)
    )
    if not changed.rowcount:
        raise NotFound(
            f"there is no app {place.app!r} in environment {place.environment!r}",
            app=place.app,
            environment=place.environment,
        )
    _audit(
        write,
        place,
        "app.protect",
        place.subject,
        before={"approvals": before.approvals},
        after={"approvals": approvals},
    )
    return after


def approve(write: Write, place: AppRef, *, function: str, revision: str, note: str = "") -> int:
    """Approve a revision of a function; return how many approvals it still needs. Idempotent per
    key.

    Raises Conflict for the key that deployed the revision.
    """
    function_id, table = place.function_id(function), tables.approvals
    author = write.sql.execute(
        sa.select(tables.revisions.c.created_by).where(*_is(function_id, revision))
    ).scalar_one()
    if author == place.actor:
        text = (
            f"{place.app}/{function}@{revision} was deployed with this key ({author}): approve it "
            f"with another key"
        )
        raise Conflict(text, revision=revision, author=author)
    row = {
        "function": function_id,
        "revision": revision,
        "actor": place.actor,
        "at": write.now,
        "note": note,
    }
    if write.sql.execute(write.insert(table).values(**row).on_conflict_do_nothing()).rowcount:
        _audit(
            write,
            place,
            "app.approve",
            f"{place.subject}/{function}@{revision}",
            after={"note": note},
        )
    return missing_approvals(write.sql, place, function=function, revision=revision)


def approvals_of(sql: sa.Connection, *, function_id: str, revision: str) -> list[dict[str, Any]]:
    """Return the approvals of a revision, oldest first: `{"by", "at", "note"}`."""
    table = tables.approvals
    query = (
        sa.select(table)
        .where(table.c.function == function_id, table.c.revision == revision)
        .order_by(table.c.at, table.c.actor)
    )
    return [{"by": row.actor, "at": row.at, "note": row.note} for row in sql.execute(query)]


def missing_approvals(sql: sa.Connection, place: AppRef, *, function: str, revision: str) -> int:
    """Return how many approvals a revision still needs before it may take traffic; 0 if it has
    served before, and for a bound function."""
    required = policy(sql, place).approvals
    if not required or is_bound(function):
        return 0  # a bound function is made of a revision that serves, with other arguments
    function_id = place.function_id(function)
    row = sql.execute(sa.select(tables.revisions).where(*_is(function_id, revision))).one()
    if row.served_at is not None:
        return 0
    given = [
        approval
        for approval in approvals_of(sql, function_id=function_id, revision=revision)
        if approval["by"] != row.created_by
    ]
    return max(0, required - len(given))


def require_approved(sql: sa.Connection, place: AppRef, *, function: str, revision: str) -> None:
    """Raise ApprovalRequired while a revision lacks approvals."""
    if left := missing_approvals(sql, place, function=function, revision=revision):
        name = f"{place.app}/{function}"
        text = (
            f"{name}@{revision} needs {left} more approval{'s' if left > 1 else ''} before it "
            f"takes traffic"
        )
        how = f"use another key than its deployer's: pilotlight app approve {name} {revision}"
        raise ApprovalRequired(f"{text}; {how}", revision=revision, approvals=left)


def require_approvals(
    write: Write, place: AppRef, *, function: str, revisions: Collection[str]
) -> None:
    """Require the approvals of revisions, and record that they have served. Raises
    ApprovalRequired."""
    for revision in sorted(revisions):
        require_approved(write.sql, place, function=function, revision=revision)
    table, function_id = tables.revisions, place.function_id(function)
    first = sa.update(table).where(
        table.c.function == function_id,
        table.c.name.in_(sorted(revisions)),
        table.c.served_at.is_(None),
    )
    write.sql.execute(first.values(served_at=write.now))


def _is(function_id: str, revision: str) -> tuple[sa.ColumnElement[bool], ...]:
    return (tables.revisions.c.function == function_id, tables.revisions.c.name == revision)


def _audit(
    write: Write,
    place: AppRef,
    action: str,
    subject: str,
    *,
    before: Mapping[str, Any] | None = None,
    after: Any,
) -> None:
    audit_trail.record(
        write,
        tenant=place.tenant,
        actor=place.actor,
        action=action,
        subject=subject,
        before=before,
        after=after,
        request=place.request,
    )
