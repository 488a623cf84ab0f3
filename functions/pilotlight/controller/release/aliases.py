"""Aliases: movable names of revisions. The platform's are `stable` and `candidate`; users define
others.

Wherever a revision is expected, an alias, a tag, `v6` (the sixth) or its full name is accepted.
"""

from __future__ import annotations

import re

import sqlalchemy as sa

from pilotlight.controller.database import audit_trail, tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.registry import feed_publisher
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.registry.feed_publisher import CANDIDATE, STABLE
from pilotlight.controller.release import traffic
from pilotlight.errors import InvalidInput, NotFound

MAX_ALIASES = 64
"""Aliases per function: activators hold every revision that has one."""
_NAME = re.compile(r"[a-z]([a-z0-9_-]{0,61}[a-z0-9])?\Z")
_REVISION = re.compile(r"v(\d{1,9})(?:-[0-9a-f]+)?\Z")


def aliases_for(sql: sa.Connection, function_id: str) -> dict[str, str]:
    """Return all aliases of a function: the platform's own and those that users defined."""
    reserved = feed_publisher.reserved_aliases(sql, traffic.get(sql, function_id))
    return {
        **feed_publisher.stored_aliases(sql, function_id),
        **{name: revision for name, revision in reserved.items() if revision},
    }


def resolve(sql: sa.Connection, place: AppRef, function: str, reference: str) -> str:
    """Return the revision that a reference names: its full name, `v<n>`, a tag or an alias. Raises
    NotFound, listing the existing names."""
    function_id, table = place.function_id(function), tables.revisions
    if numbered := _REVISION.match(reference):
        exact = (
            table.c.name == reference if "-" in reference else table.c.ordinal == int(numbered[1])
        )
        found = sql.execute(
            sa.select(table.c.name).where(table.c.function == function_id, exact)
        ).scalar()
        if found is not None:
            return str(found)
    named = {**aliases_for(sql, function_id), **traffic.get(sql, function_id).tags}
    if reference in named:
        return named[reference]
    hint = (
        f"its aliases and tags are {', '.join(sorted(named))}"
        if named
        else "it has neither aliases nor tags"
    )
    command = f"`pilotlight app revisions {place.app}/{function}` lists its revisions"
    text = f"{place.app}/{function} has no revision, alias or tag {reference!r}: {hint}; {command}"
    raise NotFound(text, function=function, revision=reference)


def set_alias(
    write: Write, place: AppRef, *, function: str, alias: str, reference: str | None
) -> dict[str, str]:
    """Point an alias at a revision, or delete it (`reference` None). Returns all aliases of the
    function. Raises InvalidInput, NotFound."""
    _check(alias)
    document = traffic.find(write.sql, place, function)
    function_id, table = place.function_id(function), tables.aliases
    known = feed_publisher.stored_aliases(write.sql, function_id)
    revision = resolve(write.sql, place, function, reference) if reference else None
    if revision is None and alias not in known:
        raise NotFound(
            f"{place.app}/{function} has no alias {alias!r}", function=function, alias=alias
        )
    if revision is not None and len({*known, alias}) > MAX_ALIASES:
        raise InvalidInput(
            f"{place.app}/{function} has {len(known)} aliases, the maximum is {MAX_ALIASES}: "
            f"delete one first",
            parameter="alias",
        )
    if revision is None:
        write.sql.execute(
            sa.delete(table).where(table.c.function == function_id, table.c.name == alias)
        )
    elif known.get(alias) != revision:
        row = {"revision": revision, "updated_by": place.actor, "updated_at": write.now}
        insert = write.insert(table).values(function=function_id, name=alias, **row)
        write.sql.execute(
            insert.on_conflict_do_update(index_elements=["function", "name"], set_=row)
        )
    if known.get(alias) != revision:
        audit_trail.record(
            write,
            tenant=place.tenant,
            actor=place.actor,
            action="alias.set" if revision else "alias.delete",
            subject=f"{place.subject}/{function}@{alias}",
            before=known.get(alias),
            after=revision,
            request=place.request,
        )
    if document.weights:
        feed_publisher.publish(write, function_id)
    return aliases_for(write.sql, function_id)


def _check(alias: str) -> None:
    if alias in (STABLE, CANDIDATE):
        how = "change the traffic instead, and the alias follows"
        raise InvalidInput(f"alias {alias!r} is managed by the platform: {how}", parameter="alias")
    if not _NAME.match(alias) or _REVISION.match(alias):
        raise InvalidInput(
            f"alias {alias!r} is invalid: use 1 to 63 lower-case letters, digits, '-' or '_', "
            f"beginning with a letter, and not the form of a revision name",
            parameter="alias",
        )
