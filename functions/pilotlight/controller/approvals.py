"""Who must agree before a revision takes traffic: an app's policy, the approvals of its revisions,
and the door that asks for them.

A key counts once for a revision, and never for one that it brought itself: keys are made by
administrators, so whoever may only deploy cannot agree with himself. What has served before needs
no approval: going back must not wait for anybody."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pilotlight.controller import audit, tables
from pilotlight.controller.places import Place
from pilotlight.controller.store import Write
from pilotlight.errors import ApprovalRequired, Conflict, NotFound
from pilotlight.spec import canonical_json

MAX_APPROVALS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How an app's releases are guarded. `approvals`: of how many keys a new revision needs before
    it takes traffic."""

    approvals: int = 0


def policy(sql: sa.Connection, place: Place) -> Policy:
    """The app's; the default for one that is not there yet."""
    text = sql.execute(sa.select(tables.apps.c.policy).where(*place.is_app())).scalar()
    return Policy(**json.loads(text)) if text else Policy()


def protect(write: Write, place: Place, *, approvals: int) -> Policy:
    """Let releases of the app need so many approvals, 0 = none. What serves goes on serving. Raises
    NotFound."""
    before, after = policy(write.sql, place), Policy(approvals=approvals)
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


def approve(write: Write, place: Place, *, function: str, revision: str, note: str = "") -> int:
    """Agree with a revision of a function; how many approvals it still needs. Again by the same
    key: nothing changes.

    Raises Conflict for the key that brought the revision.
    """
    function_id, table = place.function_id(function), tables.approvals
    author = write.sql.execute(
        sa.select(tables.revisions.c.created_by).where(*_is(function_id, revision))
    ).scalar_one()
    if author == place.actor:
        text = (
            f"{place.app}/{function}@{revision} was deployed with this key ({author}): let "
            f"another one approve it"
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
    return missing(write.sql, place, function=function, revision=revision)


def of(sql: sa.Connection, *, function_id: str, revision: str) -> list[dict[str, Any]]:
    """The approvals of a revision, the first one first: `{"by", "at", "note"}`."""
    table = tables.approvals
    query = (
        sa.select(table)
        .where(table.c.function == function_id, table.c.revision == revision)
        .order_by(table.c.at, table.c.actor)
    )
    return [{"by": row.actor, "at": row.at, "note": row.note} for row in sql.execute(query)]


def missing(sql: sa.Connection, place: Place, *, function: str, revision: str) -> int:
    """How many approvals a revision still needs before it may take traffic; 0 for one that has
    served."""
    wanted = policy(sql, place).approvals
    if not wanted:
        return 0
    function_id = place.function_id(function)
    row = sql.execute(sa.select(tables.revisions).where(*_is(function_id, revision))).one()
    if row.served_at is not None:
        return 0
    given = [
        one
        for one in of(sql, function_id=function_id, revision=revision)
        if one["by"] != row.created_by
    ]
    return max(0, wanted - len(given))


def demand(sql: sa.Connection, place: Place, *, function: str, revision: str) -> None:
    """Raise ApprovalRequired while a revision lacks approvals."""
    if left := missing(sql, place, function=function, revision=revision):
        name = f"{place.app}/{function}"
        text = (
            f"{name}@{revision} needs {left} more approval{'s' if left > 1 else ''} before it "
            f"takes traffic"
        )
        how = f"somebody else than who deployed it: pilotlight app approve {name} {revision}"
        raise ApprovalRequired(f"{text}, of {how}", revision=revision, approvals=left)


def admit(write: Write, place: Place, *, function: str, revisions: Collection[str]) -> None:
    """Let revisions take traffic, and remember that they did. Raises ApprovalRequired."""
    for revision in sorted(revisions):
        demand(write.sql, place, function=function, revision=revision)
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
    place: Place,
    action: str,
    subject: str,
    *,
    before: Mapping[str, Any] | None = None,
    after: Any,
) -> None:
    audit.record(
        write,
        tenant=place.tenant,
        actor=place.actor,
        action=action,
        subject=subject,
        before=before,
        after=after,
        request=place.request,
    )
