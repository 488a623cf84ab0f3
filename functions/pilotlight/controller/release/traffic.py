"""Traffic documents: which revision answers which callers; `change` is the one way to change it.

A change edits a function's document in one transaction: read, edit, validate, move as few segments
as possible, write with the next generation, and publish. A caller may name the generation that it
read and gets 409 if the document has changed since, so two operators cannot overwrite each other's
change unnoticed. The rows of `traffic` are authoritative for the weights, the document for the
rest."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import audit_trail, bulk, tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.registry import bound_functions, feed_publisher
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.release import app_history, approvals
from pilotlight.errors import Conflict, InvalidInput, NotFound, PilotlightError
from pilotlight.spec import traffic
from pilotlight.spec.record_json import canonical_json
from pilotlight.spec.traffic import TrafficDocument

log = logging.getLogger(__name__)

TrafficEdit = Callable[[TrafficDocument], TrafficDocument]
_WAITING = "SELECT id FROM functions WHERE id {in} AND document LIKE {}"


def get(sql: sa.Connection, function_id: str) -> TrafficDocument:
    """The document of a function, without weights if no revision serves. Raises NotFound."""
    return feed_publisher.traffic_document(sql, function_id)


def find(sql: sa.Connection, place: AppRef, function: str) -> TrafficDocument:
    """The document of a deployed function. Raises NotFound."""
    _require(sql, place, function)
    return get(sql, place.function_id(function))


def change(
    write: Write,
    place: AppRef,
    function: str,
    edit: TrafficEdit,
    *,
    expected: int | None = None,
    action: str,
    message: str = "",
    note: bool = True,
) -> TrafficDocument:
    """Change the traffic of a function; returns the new document. `function` is its name.

    `edit` gets the document and returns another; it sets only the weights, segments are derived.
    `expected`: the generation that the change is based on; None = any. `action`: of the history and
    audit entries; "" = the caller writes them, as with `note` False. An edit that changes nothing
    writes no entry.

    Raises NotFound, Conflict, InvalidInput, ApprovalRequired, without changing anything.
    """
    _require(write.sql, place, function)
    function_id = place.function_id(function)
    before = get(write.sql, function_id)
    if expected not in (None, before.generation):
        raise Conflict(
            f"the traffic of {place.app}/{function} has changed: it is at generation "
            f"{before.generation}, not {expected}; read it again, then repeat the change",
            generation=before.generation,
        )
    after = _edited(before, edit)
    traffic.validate_document(after, revisions=_revisions(write.sql, function_id))
    if taken := {feed_publisher.STABLE, feed_publisher.CANDIDATE} & (
        after.tags.keys() - before.tags.keys()
    ):
        raise InvalidInput(
            f"tag {min(taken)!r} is reserved by the platform: choose another name",
            parameter="tags",
        )
    if after != before:
        approvals.require_approvals(
            write, place, function=function, revisions=after.answering() - before.answering()
        )
        after = replace(
            after, generation=before.generation + 1, at_once=app_history.is_rollback(action)
        )
        after = traffic.begin_cutover(before, after)
        _write(write, function_id, after)
        if after.heaviest() != before.heaviest():
            bound_functions.end(write, place, function)
    feed_publisher.publish(write, function_id)
    if action and note and after != before:
        _record(write, place, function, before, after, action=action, message=message)
    return after


def record_served(write: Write, served: Collection[tuple[str, str]]) -> None:
    """End the cutovers to revisions that ran: function id, revision. No generation changes, since
    nothing that a user set does."""
    by_function: defaultdict[str, set[str]] = defaultdict(set)
    for function_id, revision in served:
        by_function[function_id].add(revision)
    for (function_id,) in bulk.select_in(write.sql, _WAITING, by_function, '%"awaited":["%'):
        before = get(write.sql, function_id)
        after = traffic.has_served(before, by_function[function_id])
        if after == before:
            continue
        try:
            with write.sql.begin_nested():
                _write(write, function_id, after)
                feed_publisher.publish(write, function_id)
        except PilotlightError as e:  # the records of the calls must not be lost for it
            log.error("event=cutover_not_ended function=%s error=%s", function_id, e)


def describe_traffic(document: TrafficDocument) -> dict[str, Any]:
    """The document for API responses, without the segments and fields that only activators use."""
    body = traffic.to_json(document)
    for name in ("segments", "salt", "at_once", "previous", "awaited"):
        del body[name]
    return body


def _edited(before: TrafficDocument, edit: TrafficEdit) -> TrafficDocument:
    wanted = edit(before)
    if (
        wanted.shadow is not None
        and wanted.shadow == before.shadow
        and wanted.shadow.revision in wanted.answering()
    ):
        wanted = replace(wanted, shadow=None)  # a revision that serves callers gets no copies
    kept = replace(
        wanted,
        weights=before.weights,
        segments=before.segments,
        salt=before.salt,
        generation=before.generation,
        at_once=before.at_once,
        previous=before.previous,
        awaited=before.awaited,
    )
    return traffic.with_weights(kept, wanted.weights)


def _write(write: Write, function_id: str, document: TrafficDocument) -> None:
    table, functions = tables.traffic, tables.functions
    write.sql.execute(sa.delete(table).where(table.c.function == function_id))
    rows = [
        {"function": function_id, "revision": name, "weight": weight}
        for name, weight in document.weights.items()
    ]
    write.sql.execute(sa.insert(table), rows)
    text = canonical_json(traffic.to_json(document)).decode()
    update = sa.update(functions).where(functions.c.id == function_id)
    write.sql.execute(update.values(document=text, generation=document.generation))


def _record(
    write: Write,
    place: AppRef,
    function: str,
    before: TrafficDocument,
    after: TrafficDocument,
    *,
    action: str,
    message: str,
) -> None:
    entry = {"function": function, "revision": after.heaviest(), "created": False}
    version = app_history.next_version(write, place)
    app_history.record_version(
        write, place, version=version, action=action, functions=[entry], message=message
    )
    audit_trail.record(
        write,
        tenant=place.tenant,
        actor=place.actor,
        action=action,
        subject=f"{place.subject}/{function}",
        before=_difference(before, after),
        after=_difference(after, before),
        request=place.request,
    )


def _difference(one: TrafficDocument, other: TrafficDocument) -> Mapping[str, Any]:
    """The fields that differ from the other document, for the audit log."""
    theirs = describe_traffic(other)
    return {name: value for name, value in describe_traffic(one).items() if value != theirs[name]}


def _require(sql: sa.Connection, place: AppRef, function: str) -> None:
    table = tables.functions
    query = sa.select(table.c.id).where(
        table.c.id == place.function_id(function), table.c.removed_at.is_(None)
    )
    if sql.execute(query).first() is None:
        raise NotFound(
            f"there is no function {place.app}/{function} in environment {place.environment!r}",
            app=place.app,
            function=function,
        )


def _revisions(sql: sa.Connection, function_id: str) -> frozenset[str]:
    table = tables.revisions
    return frozenset(
        sql.execute(sa.select(table.c.name).where(table.c.function == function_id)).scalars()
    )
