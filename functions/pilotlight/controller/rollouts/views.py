"""JSON views of rollouts for the API and the dashboard."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from pilotlight.controller.rollouts import loop, repository
from pilotlight.controller.rollouts.plan import metric_of
from pilotlight.controller.rollouts.records import ACTIVE
from pilotlight.controller.rollouts.repository import Rollout, StoredDecision
from pilotlight.spec.pricing import Rates
from pilotlight.spec.record_json import to_json


def summary(rollout: Rollout, *, now: float) -> dict[str, Any]:
    """One rollout as a list item."""
    same = (
        "id",
        "environment",
        "app",
        "function",
        "candidate",
        "stable",
        "reason",
        "created_by",
        "step",
        "weight",
    )
    times = ("step_began_at", "created_at", "updated_at", "finished_at")
    return {
        **{name: getattr(rollout, name) for name in (*same, *times)},
        "state": rollout.state.value,
        "steps": list(rollout.plan.steps),
        "every_s": rollout.plan.every_s,
        "elapsed_s": max(0.0, (rollout.finished_at or now) - rollout.step_began_at),
    }


def detail(
    sql: sa.Connection, rollout: Rollout, *, now: float, limit: int, rates: Rates | None = None
) -> dict[str, Any]:
    """One rollout with its plan, its stored decisions and the decision that would be made now (None
    if it has ended)."""
    live = (
        loop.decide_rollout(sql, rollout, now=now, rates=rates)
        if rollout.state.value in ACTIVE
        else None
    )
    return {
        **summary(rollout, now=now),
        "plan": to_json(rollout.plan),
        "now": None
        if live is None
        else {
            "verdict": live.verdict.value,
            "cause": live.cause,
            "action": live.action,
            "reasons": list(live.reasons),
            "gates": [_gate(gate.to_json()) for gate in live.gates],
        },
        "decisions": [
            decision(noted) for noted in repository.decisions(sql, rollout.id, limit=limit)
        ],
    }


def decision(noted: StoredDecision) -> dict[str, Any]:
    """One stored decision."""
    same = ("number", "at", "step", "verdict")
    return {
        **{name: getattr(noted, name) for name in same},
        "action": noted.action.removeprefix(f"{repository.BEGAN} "),
        "cause": noted.evidence.get("cause", ""),
        "reasons": list(noted.reasons),
        "gates": [_gate(gate) for gate in noted.evidence.get("gates", [])],
    }


def _gate(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "outcome": str(body["outcome"]), "unit": metric_of(body["metric"]).unit}
