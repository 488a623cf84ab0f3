"""Storage of rollouts and their ordered decisions in the database."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import audit_trail, tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.rollouts.plan import RolloutPlan, parse
from pilotlight.controller.rollouts.records import ACTIVE, Decision, RolloutState
from pilotlight.errors import NotFound
from pilotlight.spec.observations import Observation
from pilotlight.spec.record_json import canonical_json, to_json

BEGAN = "began"
"""Action prefix of a decision that (re)starts its step; its evidence contains the baseline."""
"""Actor of changes that the platform makes itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A row of `rollouts` with the names of its function. Times are seconds since the epoch."""

    id: str
    tenant: str
    uid: int | None
    environment: str
    app: str
    function: str
    function_id: str
    candidate: str
    stable: str
    plan: RolloutPlan
    state: RolloutState
    reason: str
    created_by: str
    step: int
    step_began_at: float
    created_at: float
    updated_at: float
    finished_at: float | None

    @property
    def weight(self) -> int:
        """Percent of the traffic that the plan gives the candidate; 0 after a rollback, 100 when
        done."""
        if self.state.value in ACTIVE:
            return self.plan.steps[self.step]
        return 100 if self.state is RolloutState.DONE else 0

    @property
    def name(self) -> str:
        """`<app>/<function>`."""
        return f"{self.app}/{self.function}"

    def place(self, *, actor: str = audit_trail.PLATFORM, request: str = "") -> AppRef:
        """The app of this rollout, with the actor and request of a change."""
        return AppRef(
            tenant=self.tenant,
            uid=self.uid,
            environment=self.environment,
            app=self.app,
            actor=actor,
            request=request,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDecision:
    """A stored decision. `evidence` contains the gates' results, and the baseline if a step
    began."""

    number: int
    at: float
    step: int
    verdict: str
    action: str
    reasons: tuple[str, ...]
    evidence: Mapping[str, Any]


def insert(
    write: Write,
    *,
    tenant: str,
    function_id: str,
    candidate: str,
    stable: str,
    plan: RolloutPlan,
    actor: str,
) -> str:
    """Insert a running rollout at its first step; returns its id."""
    row = {
        "id": f"ro-{secrets.token_hex(8)}",
        "tenant": tenant,
        "function": function_id,
        "candidate": candidate,
        "stable": stable,
        "plan": canonical_json(to_json(plan)).decode(),
        "state": RolloutState.RUNNING.value,
        "reason": "",
        "created_by": actor,
        "step": 0,
        "step_began_at": write.now,
        "created_at": write.now,
        "updated_at": write.now,
        "finished_at": None,
    }
    write.sql.execute(sa.insert(tables.rollouts).values(**row))
    return str(row["id"])


def update(write: Write, rollout: Rollout, **values: Any) -> bool:
    """Change a rollout if its row is still in the state that was read; False if another process
    changed it."""
    table = tables.rollouts
    same = (
        table.c.id == rollout.id,
        table.c.state == rollout.state.value,
        table.c.step == rollout.step,
    )
    changed = (
        sa.update(table)
        .where(*same, table.c.step_began_at == rollout.step_began_at)
        .values(**values, updated_at=write.now)
    )
    return write.sql.execute(changed).rowcount == 1


def find(sql: sa.Connection, *, tenant: str, rollout: str) -> Rollout:
    """One rollout of a tenant. Raises NotFound."""
    table = tables.rollouts
    for found in _select(sql, table.c.tenant == tenant, table.c.id == rollout):
        return found
    raise NotFound(
        f"there is no rollout {rollout!r}: `pilotlight rollout list` shows them", rollout=rollout
    )


def running(sql: sa.Connection, function_id: str) -> Rollout | None:
    """The active (running or paused) rollout of a function, if any."""
    return next(
        iter(
            _select(
                sql, tables.rollouts.c.function == function_id, tables.rollouts.c.state.in_(ACTIVE)
            )
        ),
        None,
    )


def active(sql: sa.Connection) -> list[Rollout]:
    """All active rollouts of all tenants, newest first."""
    return _select(sql, tables.rollouts.c.state.in_(ACTIVE))


def listing(
    sql: sa.Connection,
    *,
    tenant: str,
    environment: str | None = None,
    app: str | None = None,
    function: str | None = None,
    state: str | None = None,
    limit: int = 100,
) -> list[Rollout]:
    """A tenant's rollouts, newest first. `state`: one of `RolloutState`, or `active`."""
    functions, table = tables.functions, tables.rollouts
    where: list[sa.ColumnElement[bool]] = [table.c.tenant == tenant]
    pairs = (
        (functions.c.environment, environment),
        (functions.c.app, app),
        (functions.c.name, function),
    )
    where += [column == value for column, value in pairs if value is not None]
    if state is not None:
        where.append(table.c.state.in_(ACTIVE) if state == "active" else table.c.state == state)
    return _select(sql, *where, limit=limit)


def _select(
    sql: sa.Connection, *where: sa.ColumnElement[bool], limit: int | None = None
) -> list[Rollout]:
    table, functions, tenants = tables.rollouts, tables.functions, tables.tenants
    names = (
        functions.c.environment,
        functions.c.app,
        functions.c.name.label("function_name"),
        tenants.c.uid,
    )
    query = (
        sa.select(table, *names)
        .join(functions, functions.c.id == table.c.function)
        .join(tenants, tenants.c.id == table.c.tenant)
    )
    query = query.where(*where).order_by(table.c.created_at.desc(), table.c.id)
    rows = sql.execute(query if limit is None else query.limit(limit)).mappings()
    return [_rollout(row) for row in rows]


def _rollout(row: sa.RowMapping) -> Rollout:
    same = (
        "id",
        "tenant",
        "uid",
        "environment",
        "app",
        "candidate",
        "stable",
        "reason",
        "created_by",
        "step",
        "created_at",
        "updated_at",
    )
    return Rollout(
        **{name: row[name] for name in same},
        function=row["function_name"],
        function_id=row["function"],
        state=RolloutState(row["state"]),
        plan=parse(json.loads(row["plan"])),
        step_began_at=row["step_began_at"] or row["created_at"],
        finished_at=row["finished_at"],
    )


def record_decision(
    write: Write,
    rollout: str,
    *,
    step: int,
    decision: Decision,
    baseline: Mapping[str, Observation] | None = None,
) -> int:
    """Store a decision; returns its number. `baseline`: revision → its observations in this minute
    before step `step` began."""
    table = tables.rollout_decisions
    last = write.sql.execute(
        sa.select(sa.func.max(table.c.number)).where(table.c.rollout == rollout)
    ).scalar()
    evidence: dict[str, Any] = {
        "signature": decision.signature,
        "cause": decision.cause,
        "gates": [g.to_json() for g in decision.gates],
    }
    action = decision.action
    if baseline is not None:
        evidence["baseline"] = {revision: seen.to_json() for revision, seen in baseline.items()}
        action = f"{BEGAN} {action}"
    row = {
        "rollout": rollout,
        "number": (last or 0) + 1,
        "at": write.now,
        "step": step,
        "verdict": decision.verdict.value,
    }
    texts = {
        "reasons": canonical_json(list(decision.reasons)).decode(),
        "evidence": canonical_json(evidence).decode(),
    }
    write.sql.execute(sa.insert(table).values(**row, action=action, **texts))
    return int(row["number"])


def decisions(sql: sa.Connection, rollout: str, *, limit: int = 100) -> list[StoredDecision]:
    """The newest decisions first."""
    table = tables.rollout_decisions
    return _decisions(
        sql,
        sa.select(table)
        .where(table.c.rollout == rollout)
        .order_by(table.c.number.desc())
        .limit(limit),
    )


def baseline_of(sql: sa.Connection, rollout: Rollout) -> dict[str, Observation]:
    """Revision → its observations in the minute in which the current step began, before it
    began."""
    table = tables.rollout_decisions
    began = (
        table.c.rollout == rollout.id,
        table.c.step == rollout.step,
        table.c.action.startswith(BEGAN),
    )
    found = _decisions(sql, sa.select(table).where(*began).order_by(table.c.number.desc()).limit(1))
    stored = found[0].evidence.get("baseline", {}) if found else {}
    return {revision: Observation.from_json(body) for revision, body in stored.items()}


def is_stall_notified(sql: sa.Connection, rollout: Rollout) -> bool:
    """Whether a notification of a stall was sent since the current step began."""
    table = tables.rollout_decisions
    conditions = (
        table.c.rollout == rollout.id,
        table.c.step == rollout.step,
        table.c.action == "tell",
        table.c.at >= rollout.step_began_at,
    )
    return sql.execute(sa.select(table.c.number).where(*conditions).limit(1)).first() is not None


def _decisions(sql: sa.Connection, query: sa.Select[Any]) -> list[StoredDecision]:
    rows: Sequence[sa.Row[Any]] = sql.execute(query).all()
    same = ("number", "at", "step", "verdict", "action")
    return [
        StoredDecision(
            **{name: getattr(row, name) for name in same},
            reasons=tuple(json.loads(row.reasons)),
            evidence=json.loads(row.evidence),
        )
        for row in rows
    ]
