"""Release of revisions: make a revision serve at once or by a rollout, promote, pin, and roll back.

Each is a change of a function's traffic (`traffic.change`). A rollback to a revision that served
before needs no approval or gate: it gives that revision all traffic at once, and ends any rollout
or experiment of the function."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.experiments import lifecycle as experiments
from pilotlight.controller.registry import revisions
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.registry.revisions import RevisionMetadata
from pilotlight.controller.release import aliases, app_history, approvals, release_gates, traffic
from pilotlight.controller.rollouts import lifecycle as rollouts
from pilotlight.controller.rollouts import repository
from pilotlight.controller.rollouts.plan import RolloutPlan
from pilotlight.controller.rollouts.records import RolloutState
from pilotlight.errors import Conflict, InvalidInput
from pilotlight.spec.traffic import WHOLE, TrafficDocument


class ReleaseStage(enum.StrEnum):
    """State of a revision after a deploy: it serves (LIVE), is WAITING for approvals, has no
    traffic as requested (NO_TRAFFIC), or is in a ROLLOUT."""

    LIVE = "live"
    WAITING = "waiting"
    NO_TRAFFIC = "no_traffic"
    ROLLOUT = "rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseOptions:
    """How to release a deployed revision.

    Attributes:
        metadata: metadata of the new revisions.
        plan: plan of a rollout; None = all traffic at once.
        no_traffic: create the revisions without changing the traffic.
        tag: name under which the revisions can be called whatever their traffic; "" = none.
        allow_breaking: accept a schema that breaks callers.
        override_freeze: release although an error budget is spent; for administrators.
    """

    metadata: RevisionMetadata = field(default_factory=RevisionMetadata)
    plan: RolloutPlan | None = None
    no_traffic: bool = False
    tag: str = ""
    allow_breaking: bool = False
    override_freeze: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseResult:
    """Result of a release: `approvals`: number still required; `rollout`: id of the rollout that
    releases the revision."""

    stage: ReleaseStage
    approvals: int = 0
    rollout: str = ""


def release(
    write: Write,
    place: AppRef,
    *,
    function: str,
    revision: str,
    terms: ReleaseOptions,
    action: str = "",
    message: str = "",
) -> ReleaseResult:
    """Release a revision according to `terms`. Raises the errors of
    `release_gates.require_all_gates` and `traffic.change`, without changing anything.

    `action`: of the history entry; "" = the caller writes the entry.
    """
    serves = serving_revision(write.sql, place.function_id(function))
    if terms.no_traffic:
        return _without_traffic(write, place, function, revision, serving=serves, tag=terms.tag)
    running = repository.running(write.sql, place.function_id(function))
    if running is not None and running.candidate == revision and terms.plan is None and not action:
        # deployed again unchanged, while its rollout is active
        return ReleaseResult(stage=ReleaseStage.ROLLOUT, rollout=running.id)
    if revision != serves:
        release_gates.require_all_gates(
            write,
            place,
            function=function,
            revision=revision,
            serving=serves,
            allow_breaking=terms.allow_breaking,
            override_freeze=terms.override_freeze,
        )
    if left := approvals.missing_approvals(write.sql, place, function=function, revision=revision):
        if serves and terms.tag:
            traffic.change(write, place, function, _tagged(terms.tag, revision), action="")
        return ReleaseResult(stage=ReleaseStage.WAITING, approvals=left)
    if terms.plan is not None and serves and revision != serves:
        rollout = rollouts.begin(
            write, place, function=function, candidate=revision, plan=terms.plan
        )
        if terms.tag:
            traffic.change(write, place, function, _tagged(terms.tag, revision), action="")
        return ReleaseResult(stage=ReleaseStage.ROLLOUT, rollout=rollout)
    rollouts.end(write, place.function_id(function), reason=f"{revision} was given all traffic")
    traffic.change(
        write, place, function, _whole(revision, tag=terms.tag), action=action, message=message
    )
    return ReleaseResult(stage=ReleaseStage.LIVE)


def serving_revision(sql: sa.Connection, function_id: str) -> str:
    """The serving revision: during a rollout the stable one, otherwise the one of most traffic; ""
    if none serves."""
    document = traffic.get(sql, function_id)
    return document.stable or document.heaviest()


def promote(
    write: Write,
    place: AppRef,
    *,
    function: str,
    reference: str,
    terms: ReleaseOptions,
    message: str = "",
) -> tuple[str, ReleaseResult]:
    """Release an existing revision; returns its name and the result. Raises NotFound,
    ApprovalRequired and the errors of `release`."""
    traffic.find(write.sql, place, function)
    revision = aliases.resolve(write.sql, place, function, reference)
    approvals.require_approved(write.sql, place, function=function, revision=revision)
    if terms.metadata.evaluation or terms.metadata.lineage:
        revisions.set_metadata(
            write, place.function_id(function), revision, metadata=terms.metadata
        )
    return revision, release(
        write,
        place,
        function=function,
        revision=revision,
        terms=terms,
        action="promote",
        message=message,
    )


def rollback(
    write: Write,
    place: AppRef,
    *,
    function: str,
    reference: str | None = None,
    message: str = "",
    note: bool = True,
) -> tuple[str, TrafficDocument]:
    """Send all traffic to a revision (None: the previous one) at once. Raises NotFound; Conflict if
    no revision served before.

    A revision that never served must pass the gates of a release. `note` False: the caller writes
    the entries of the history and the audit log.
    """
    document = traffic.find(write.sql, place, function)
    revision = (
        aliases.resolve(write.sql, place, function, reference)
        if reference
        else previous_revision(write.sql, place, function, document)
    )
    release_gates.require_gates_for_change(
        write, place, function=function, before=document, after=_back(revision)(document)
    )
    function_id, reason = place.function_id(function), f"rolled back to {revision}"
    rollouts.end(write, function_id, state=RolloutState.ROLLED_BACK, reason=reason)
    experiments.stop(write, function_id, reason=reason)
    return revision, traffic.change(
        write,
        place,
        function,
        _back(revision),
        action=app_history.ROLLBACK,
        message=message,
        note=note,
    )


def previous_revision(
    sql: sa.Connection, place: AppRef, function: str, document: TrafficDocument
) -> str:
    """The revision to roll back to: the stable one of a rollout, otherwise the one that served
    before the newest one with traffic."""
    if document.stable:
        return document.stable
    function_id = place.function_id(function)
    if not document.weights:
        raise Conflict(
            f"{place.app}/{function} has no serving revision: promote one with `pilotlight app "
            f"promote {place.app}/{function} v1`"
        )
    newest = revisions.newest_revision(sql, function_id=function_id, names=list(document.weights))
    current = newest if len(document.weights) > 1 else document.heaviest()
    good = app_history.last_good_revision(_changes(sql, place, function), current)
    if good is None:
        how = (
            f"name one: pilotlight app rollback {place.app}/{function} --to REVISION "
            f"(`pilotlight app revisions` lists them)"
        )
        raise Conflict(
            f"no revision of {place.app}/{function} served before {current}: {how}",
            function=function,
            revision=current,
        )
    return good


def pin_tenant(
    write: Write, place: AppRef, *, function: str, tenant: str, reference: str | None
) -> TrafficDocument:
    """Pin a tenant's callers to a revision whatever the weights; None removes the pin. Raises
    NotFound, ApprovalRequired."""
    traffic.find(write.sql, place, function)
    revision = aliases.resolve(write.sql, place, function, reference) if reference else None
    if (
        revision
        and write.sql.execute(
            sa.select(tables.tenants.c.id).where(tables.tenants.c.name == tenant)
        ).first()
        is None
    ):
        raise InvalidInput(
            f"there is no tenant {tenant!r}: a pin needs the name of an existing tenant",
            parameter="tenant",
        )

    def edit(document: TrafficDocument) -> TrafficDocument:
        others = {name: pinned for name, pinned in document.pins.items() if name != tenant}
        after = replace(document, pins={**others, tenant: revision} if revision else others)
        release_gates.require_gates_for_change(
            write, place, function=function, before=document, after=after
        )
        return after

    message = f"{tenant} is pinned to {revision}" if revision else f"{tenant} follows the weights"
    return traffic.change(
        write, place, function, edit, action="pin" if revision else "unpin", message=message
    )


def _without_traffic(
    write: Write, place: AppRef, function: str, revision: str, *, serving: str, tag: str
) -> ReleaseResult:
    if not serving:
        text = (
            f"function {function!r} has no serving revision yet, so its first revision must "
            f"take the traffic"
        )
        raise InvalidInput(
            f"{text}: deploy it without --no-traffic first",
            parameter="no_traffic",
            function=function,
        )
    if tag:
        traffic.change(write, place, function, _tagged(tag, revision), action="")
    return ReleaseResult(
        stage=ReleaseStage.LIVE if revision == serving else ReleaseStage.NO_TRAFFIC
    )


def _whole(revision: str, *, tag: str) -> Callable[[TrafficDocument], TrafficDocument]:
    def edit(document: TrafficDocument) -> TrafficDocument:
        tags = {**document.tags, tag: revision} if tag else document.tags
        return replace(document, weights={revision: WHOLE}, tags=tags, stable="")

    return edit


def _back(revision: str) -> Callable[[TrafficDocument], TrafficDocument]:
    return lambda document: replace(document, weights={revision: WHOLE}, stable="", experiment=None)


def _tagged(tag: str, revision: str) -> Callable[[TrafficDocument], TrafficDocument]:
    return lambda document: replace(document, tags={**document.tags, tag: revision})


def _changes(sql: sa.Connection, place: AppRef, function: str) -> Iterator[tuple[str, str]]:
    """The revision of most traffic after each change of the app that concerned the function, oldest
    first."""
    table = tables.deployments
    where = (
        table.c.tenant == place.tenant,
        table.c.environment == place.environment,
        table.c.app == place.app,
    )
    newest = (
        sa.select(table.c.action, table.c.functions)
        .where(*where)
        .order_by(table.c.version.desc())
        .limit(app_history.MAX_ENTRIES)
    )
    for row in reversed(sql.execute(newest).all()):
        entries: list[dict[str, Any]] = json.loads(row.functions)
        for entry in entries:
            if (
                entry["function"] == function
                and entry["revision"]
                and entry.get("stage", ReleaseStage.LIVE) == ReleaseStage.LIVE
            ):
                yield row.action, entry["revision"]
