"""Life cycle of an experiment: DRAFT → RUNNING → STOPPED or CONCLUDED. A function has at most one
running experiment.

Units are assigned only while it is RUNNING. An ended experiment cannot be restarted, because its
units would have met two experiments under one name."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import audit_trail, tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.experiments.design import ArmStop, Design
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.release import aliases, release_gates, traffic
from pilotlight.controller.webhooks import deliveries
from pilotlight.errors import Conflict, InvalidInput, NotFound
from pilotlight.spec import traffic as documents
from pilotlight.spec.identifiers import require_name
from pilotlight.spec.record_json import canonical_json
from pilotlight.spec.traffic import WHOLE, ExperimentTraffic, TrafficDocument

DRAFT, RUNNING, STOPPED, CONCLUDED = "DRAFT", "RUNNING", "STOPPED", "CONCLUDED"
MAX_REASON = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A row of `experiments`; `winner` is the arm that it was concluded with."""

    id: str
    tenant: str
    environment: str
    app: str
    function: str
    function_id: str
    name: str
    state: str
    reason: str
    design: Design
    winner: str
    created_by: str
    created_at: float
    began_at: float | None
    ended_at: float | None

    def to_json(self) -> dict[str, Any]:
        """As JSON values, without the salt."""
        body = {
            name: getattr(self, name)
            for name in self.__slots__
            if name not in ("design", "tenant", "function_id")
        }
        design = self.design.to_json()
        del design["salt"]
        return {**body, **design}


def get(sql: sa.Connection, *, tenant: str, experiment: str) -> Experiment:
    """One experiment. Raises NotFound, also for an experiment of another tenant."""
    found = _find(sql, tables.experiments.c.id == experiment, tables.experiments.c.tenant == tenant)
    if not found:
        raise NotFound(f"there is no experiment {experiment!r}", experiment=experiment)
    return found[0]


def listing(sql: sa.Connection, *, tenant: str, environment: str) -> list[Experiment]:
    """The experiments of an environment, newest first."""
    return _find(
        sql, tables.experiments.c.tenant == tenant, tables.functions.c.environment == environment
    )


def running(sql: sa.Connection) -> list[Experiment]:
    """All running experiments of all tenants."""
    return _find(sql, tables.experiments.c.state == RUNNING)


def create(write: Write, place: AppRef, *, function: str, name: str, design: Design) -> Experiment:
    """Create a draft, to which no units are assigned. Raises InvalidInput, NotFound (function or
    revision), Conflict (the name is in use)."""
    require_name("experiment", name, parameter="name")
    function_id = _function(write.sql, place, function)
    arms = tuple(
        replace(arm, revision=aliases.resolve(write.sql, place, function, arm.revision))
        for arm in design.arms
    )
    design = replace(design, arms=arms)
    _require_valid_design(write.sql, function_id, design)
    row = {
        "id": f"x-{os.urandom(6).hex()}",
        "tenant": place.tenant,
        "function": function_id,
        "name": name,
        "document": _text(design),
        "state": DRAFT,
        "reason": "",
        "created_by": place.actor,
        "created_at": write.now,
    }
    made = write.sql.execute(
        write.insert(tables.experiments).values(**row).on_conflict_do_nothing()
    )
    if not made.rowcount:
        raise Conflict(
            f"{place.app}/{function} already has an experiment {name!r}: choose another name",
            name=name,
        )
    _record(
        write,
        place,
        "experiment.create",
        function,
        after={"experiment": row["id"], "name": name, "design": design.to_json()},
    )
    return get(write.sql, tenant=place.tenant, experiment=str(row["id"]))


def start(write: Write, place: AppRef, found: Experiment) -> Experiment:
    """Start assigning units.

    Raises Conflict when it is not a DRAFT, or another experiment or a rollout runs on the function;
    for arms that never served, the errors of `release_gates.require_gates_for_change`."""
    if found.state != DRAFT:
        raise Conflict(
            f"experiment {found.name!r} is {found.state}: only a DRAFT can be started; create a "
            "new one",
            state=found.state,
        )
    require_no_experiment(write.sql, found.function_id)
    rollouts = tables.rollouts
    if (
        rollout := write.sql.execute(
            sa.select(rollouts.c.id).where(
                rollouts.c.function == found.function_id, rollouts.c.finished_at.is_(None)
            )
        ).scalar()
    ) is not None:
        raise Conflict(
            f"rollout {rollout} runs on {found.app}/{found.function}: it would change the traffic "
            f"during the comparison",
            rollout=rollout,
        )
    follow, document = found.design.traffic(found.id), traffic.get(write.sql, found.function_id)
    release_gates.require_gates_for_change(
        write,
        place,
        function=found.function,
        before=document,
        after=replace(document, experiment=follow),
    )
    _set(write, found.id, state=RUNNING, began_at=write.now)
    _steer(write, place, found, follow, action="experiment.start", message=found.name)
    _notify(write, found, "started", found.name)
    return get(write.sql, tenant=found.tenant, experiment=found.id)


def halt(write: Write, place: AppRef, found: Experiment, *, reason: str) -> Experiment:
    """Stop an experiment (kill switch): all units follow the function's weights. Raises Conflict
    when it does not run."""
    _require_running(found)
    _set(write, found.id, state=STOPPED, reason=reason[:MAX_REASON], ended_at=write.now)
    _steer(write, place, found, None, action="experiment.stop", message=reason[:MAX_REASON])
    _notify(write, found, "stopped", reason)
    return get(write.sql, tenant=found.tenant, experiment=found.id)


def stop_arm(
    write: Write, place: AppRef, found: Experiment, *, arm: str, reason: str
) -> Experiment:
    """Give an arm's share to the first arm; without another arm left, the experiment ends. Raises
    Conflict, InvalidInput."""
    _require_running(found)
    if found.design.arm(arm) is found.design.arms[0]:
        raise InvalidInput(
            f"arm {arm!r} is the arm that others are compared with: stop the experiment instead",
            parameter="arm",
        )
    design = replace(
        found.design,
        stopped={**found.design.stopped, arm: ArmStop(at=write.now, reason=reason[:MAX_REASON])},
    )
    follow = design.traffic(found.id)
    ending = (
        {}
        if follow
        else {
            "state": STOPPED,
            "reason": f"arm {arm}: {reason}"[:MAX_REASON],
            "ended_at": write.now,
        }
    )
    _set(write, found.id, document=_text(design), **ending)
    _steer(
        write,
        place,
        found,
        follow,
        action="experiment.stop_arm",
        message=f"{arm}: {reason}"[:MAX_REASON],
    )
    _notify(write, found, "arm_stopped", reason, arm=arm)
    if not follow:
        _notify(write, found, "stopped", f"arm {arm}: {reason}")
    return get(write.sql, tenant=found.tenant, experiment=found.id)


def conclude(write: Write, place: AppRef, found: Experiment, *, arm: str) -> Experiment:
    """End an experiment and give all traffic to the revision of `arm`. Raises Conflict when it
    never ran or is already concluded, InvalidInput."""
    if found.state not in (RUNNING, STOPPED):
        raise Conflict(
            f"experiment {found.name!r} is {found.state}: only a RUNNING or STOPPED one can be "
            "concluded",
            state=found.state,
        )
    revision = found.design.arm(arm).revision
    _set(
        write,
        found.id,
        state=CONCLUDED,
        reason=f"arm {arm}",
        ended_at=write.now if found.ended_at is None else found.ended_at,
    )

    _steer(
        write,
        place,
        found,
        None,
        action="experiment.conclude",
        message=f"{found.name}: arm {arm}",
        winner=revision,
    )
    _notify(write, found, "concluded", f"arm {arm}", arm=arm)
    return get(write.sql, tenant=found.tenant, experiment=found.id)


def stop(write: Write, function_id: str, *, reason: str) -> list[str]:
    """Mark the running experiment of a function as STOPPED; returns its id, if there is one.

    For callers that change the traffic anyway (a rollback): their change removes `experiment` from
    the document."""
    table = tables.experiments
    ids = list(
        write.sql.execute(
            sa.select(table.c.id).where(table.c.function == function_id, table.c.state == RUNNING)
        ).scalars()
    )
    for found in _find(write.sql, table.c.id.in_(ids)) if ids else ():
        _set(write, found.id, state=STOPPED, reason=reason[:MAX_REASON], ended_at=write.now)
        _notify(write, found, "stopped", reason)
    return ids


def require_no_experiment(sql: sa.Connection, function_id: str) -> None:
    """Raise Conflict while an experiment runs on a function: a rollout or a second experiment would
    change the traffic during its comparison."""
    if found := _find(
        sql, tables.experiments.c.function == function_id, tables.experiments.c.state == RUNNING
    ):
        one = found[0]
        hint = f"Conclude or stop it first: pilotlight experiment stop {one.id}"
        raise Conflict(
            f"experiment {one.name!r} runs on {one.app}/{one.function}",
            experiment=one.id,
            hint=hint,
        )


def _steer(
    write: Write,
    place: AppRef,
    found: Experiment,
    follow: ExperimentTraffic | None,
    *,
    action: str,
    message: str,
    winner: str = "",
) -> None:
    """Change the traffic document that activators apply, and record it in the audit trail even if
    the document stays the same. `winner`: the revision that gets all traffic."""

    def edit(document: TrafficDocument) -> TrafficDocument:
        is_ours = follow is not None or (
            document.experiment is not None and document.experiment.id == found.id
        )
        after = replace(document, experiment=follow) if is_ours else document
        return documents.with_weights(after, {winner: WHOLE}) if winner else after

    generation = traffic.get(write.sql, found.function_id).generation
    after = traffic.change(write, place, found.function, edit, action=action, message=message)
    if after.generation == generation:
        _record(
            write, place, action, found.function, after={"experiment": found.id, "message": message}
        )


def _notify(write: Write, found: Experiment, event: str, reason: str, *, arm: str = "") -> None:
    """Send a webhook event; once per experiment, event and arm."""
    body = {
        "experiment": found.id,
        "name": found.name,
        "environment": found.environment,
        "app": found.app,
        "function": found.function,
        "reason": reason[:MAX_REASON],
        "at": write.now,
        **({"arm": arm} if arm else {}),
    }
    kind = f"experiment.{event}"
    once = f"{found.id}/{event}/{arm}"
    deliveries.enqueue(
        write, tenant=found.tenant, environment=found.environment, event=kind, body=body, once=once
    )


def _find(sql: sa.Connection, *where: sa.ColumnElement[bool]) -> list[Experiment]:
    table, functions = tables.experiments, tables.functions
    columns = (functions.c.environment, functions.c.app, functions.c.name.label("function_name"))
    query = (
        sa.select(table, *columns).join(functions, functions.c.id == table.c.function).where(*where)
    )
    return [
        _experiment(row)
        for row in sql.execute(query.order_by(table.c.created_at.desc(), table.c.id)).mappings()
    ]


def _experiment(row: sa.RowMapping) -> Experiment:
    kept = (
        "id",
        "tenant",
        "environment",
        "app",
        "name",
        "state",
        "reason",
        "created_by",
        "created_at",
        "began_at",
        "ended_at",
    )
    winner = row["reason"].removeprefix("arm ") if row["state"] == CONCLUDED else ""
    design = Design.from_json(json.loads(row["document"]))
    values = {name: row[name] for name in kept}
    return Experiment(
        **values,
        function=row["function_name"],
        function_id=row["function"],
        design=design,
        winner=winner,
    )


def _set(write: Write, experiment: str, **values: Any) -> None:
    write.sql.execute(
        sa.update(tables.experiments).where(tables.experiments.c.id == experiment).values(**values)
    )


def _require_running(found: Experiment) -> None:
    if found.state != RUNNING:
        raise Conflict(
            f"experiment {found.name!r} is {found.state}: it is not running", state=found.state
        )


def _function(sql: sa.Connection, place: AppRef, function: str) -> str:
    table = tables.functions
    query = sa.select(table.c.id).where(
        *place.in_app(), table.c.name == function, table.c.removed_at.is_(None)
    )
    found = sql.execute(query).scalar()
    if found is None:
        raise NotFound(
            f"there is no function {place.app}/{function} in environment {place.environment!r}",
            app=place.app,
            function=function,
        )
    return str(found)


def _require_valid_design(sql: sa.Connection, function_id: str, design: Design) -> None:
    """Raise InvalidInput now for what would be rejected at the start: unknown revisions, names,
    units, a radius that is too wide."""
    table = tables.revisions
    revisions = frozenset(
        sql.execute(sa.select(table.c.name).where(table.c.function == function_id)).scalars()
    )
    documents.validate_document(
        replace(traffic.get(sql, function_id), experiment=design.traffic("new")),
        revisions=revisions,
    )


def _text(design: Design) -> str:
    return canonical_json(design.to_json()).decode()


def _record(
    write: Write, place: AppRef, action: str, function: str, *, after: Mapping[str, Any]
) -> None:
    subject = f"{place.subject}/{function}"
    audit_trail.record(
        write,
        tenant=place.tenant,
        actor=place.actor,
        action=action,
        subject=subject,
        after=dict(after),
        request=place.request,
    )
