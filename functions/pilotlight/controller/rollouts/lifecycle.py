"""Start, advance and end a rollout. Each change is one transaction over its row, its decision, the
traffic and the webhook event.

A controller that dies between two steps therefore leaves the rollout at one of them, and a decision
made from an outdated state changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import audit_trail, tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.experiments import lifecycle as experiments
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.release import traffic
from pilotlight.controller.rollouts import evidence, repository
from pilotlight.controller.rollouts.plan import PREDICTION_KS, QUALITY, RolloutPlan
from pilotlight.controller.rollouts.records import ACTIVE, Decision, RolloutState, Verdict
from pilotlight.controller.rollouts.repository import Rollout
from pilotlight.controller.webhooks import deliveries
from pilotlight.errors import Conflict, InvalidInput, NotFound
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.record_json import from_json, to_json
from pilotlight.spec.traffic import WHOLE, TrafficDocument

_ENDS = {
    Verdict.DONE: RolloutState.DONE,
    Verdict.ROLLBACK: RolloutState.ROLLED_BACK,
    Verdict.HALT: RolloutState.HALTED,
}
_EVENTS = {
    Verdict.ADVANCE: "rollout.advanced",
    Verdict.HOLD: "rollout.held",
    Verdict.ROLLBACK: "rollout.rolled_back",
    Verdict.HALT: "rollout.halted",
    Verdict.DONE: "rollout.done",
}
_ACTIONS = {
    Verdict.ADVANCE: "rollout.advance",
    Verdict.ROLLBACK: "rollout.rollback",
    Verdict.HALT: "rollout.rollback",
    Verdict.DONE: "rollout.done",
}


def begin(write: Write, place: AppRef, *, function: str, candidate: str, plan: RolloutPlan) -> str:
    """Start a rollout: give a candidate the first step's share of the traffic. Returns the
    rollout's id. `function` is its name.

    The revision that serves now becomes stable; an active rollout is superseded, and its stable
    revision remains stable. Raises NotFound, Conflict when no revision serves that the candidate
    could be compared with, and the errors of `traffic.change`."""
    function_id = place.function_id(function)
    stable = _stable_of(write, place, function, candidate)
    experiments.require_no_experiment(write.sql, function_id)
    spec = _spec(write.sql, function_id, candidate)
    _require_watched(plan, spec)
    objectives = spec.objectives
    if objectives is not None:
        plan = replace(plan, availability=objectives.availability)
    end(write, function_id, reason=f"{candidate} was deployed", keep_stable=True)
    rollout = repository.insert(
        write,
        tenant=place.tenant,
        function_id=function_id,
        candidate=candidate,
        stable=stable,
        plan=plan,
        actor=place.actor,
    )
    weights = split(candidate, stable, plan.steps[0])
    message = f"{candidate} gets {plan.steps[0]} %"
    traffic.change(
        write,
        place,
        function,
        _edit(weights, stable=stable),
        action="rollout.start",
        message=message,
    )
    first = Decision(
        verdict=Verdict.ADVANCE,
        cause="begun",
        reasons=(f"started by {place.actor}",),
        weight=plan.steps[0],
    )
    seen = evidence.this_minute(
        write.sql,
        tenant=place.tenant,
        function_id=function_id,
        revisions=(candidate, stable),
        now=write.now,
    )
    repository.record_decision(write, rollout, step=0, decision=first, baseline=seen)
    _notify(
        write,
        repository.find(write.sql, tenant=place.tenant, rollout=rollout),
        "rollout.started",
        first.reasons,
        once=rollout,
    )
    return rollout


def end(
    write: Write,
    function_id: str,
    *,
    state: RolloutState = RolloutState.SUPERSEDED,
    reason: str,
    keep_stable: bool = False,
) -> str | None:
    """End a function's rollout because its traffic changes otherwise; returns its id. The caller
    sets the weights.

    `keep_stable`: keep the stable revision warm, because another rollout begins.
    """
    rollout = repository.running(write.sql, function_id)
    if rollout is None:
        return None
    repository.update(write, rollout, state=state.value, reason=reason, finished_at=write.now)
    last = Decision(
        verdict=Verdict.ROLLBACK if state is RolloutState.ROLLED_BACK else Verdict.HOLD,
        cause=state.value,
        reasons=(reason,),
    )
    repository.record_decision(write, rollout.id, step=rollout.step, decision=last)
    current = traffic.get(write.sql, function_id)
    if not keep_stable and current.stable and current.weights:
        traffic.change(
            write,
            rollout.place(),
            rollout.function,
            lambda document: replace(document, stable=""),
            action="",
        )
    ended = replace(rollout, state=state, reason=reason, finished_at=write.now)
    _notify(
        write,
        ended,
        f"rollout.{'rolled_back' if state is RolloutState.ROLLED_BACK else 'ended'}",
        (reason,),
        once=f"{rollout.id}/end",
    )
    return rollout.id


def follow(write: Write, rollout: Rollout, decision: Decision) -> bool:
    """Carry out a decision in one transaction; False when the rollout has changed since it was
    evaluated."""
    ended = _ENDS.get(decision.verdict)
    if ended is not None:
        return finish(
            write,
            rollout,
            state=ended,
            decision=decision,
            place=rollout.place(),
            action=_ACTIONS[decision.verdict],
        )
    if decision.verdict is Verdict.ADVANCE:
        return _advance(write, rollout, decision)
    if not repository.update(write, rollout):
        return False
    number = repository.record_decision(write, rollout.id, step=rollout.step, decision=decision)
    if decision.tell:
        _notify(
            write,
            rollout,
            _EVENTS[decision.verdict],
            decision.reasons,
            once=f"{rollout.id}/{number}",
        )
    return True


def _advance(write: Write, rollout: Rollout, decision: Decision) -> bool:
    step = rollout.step + 1
    if not repository.update(write, rollout, step=step, step_began_at=write.now):
        return False
    weight = rollout.plan.steps[step]
    edit = _edit(split(rollout.candidate, rollout.stable, weight), stable=rollout.stable)
    message = f"{rollout.candidate} gets {weight} %"
    traffic.change(
        write, rollout.place(), rollout.function, edit, action="rollout.advance", message=message
    )
    number = repository.record_decision(
        write, rollout.id, step=step, decision=decision, baseline=_baseline(write, rollout)
    )
    _notify(
        write,
        replace(rollout, step=step),
        "rollout.advanced",
        decision.reasons,
        once=f"{rollout.id}/{number}",
    )
    return True


def start_over(write: Write, rollout: Rollout, *, reason: str) -> bool:
    """Restart the step because its evidence or its time is not valid."""
    if not repository.update(write, rollout, step_began_at=write.now):
        return False
    held = Decision(verdict=Verdict.HOLD, cause="started_over", reasons=(reason,))
    repository.record_decision(
        write, rollout.id, step=rollout.step, decision=held, baseline=_baseline(write, rollout)
    )
    return True


def finish(
    write: Write,
    rollout: Rollout,
    *,
    state: RolloutState,
    decision: Decision,
    place: AppRef,
    action: str,
) -> bool:
    """End a rollout with all traffic on one revision: the candidate when DONE, otherwise stable."""
    reason = "passed every step" if decision.cause == "passed" else decision.reasons[0]
    if not repository.update(
        write, rollout, state=state.value, reason=reason, finished_at=write.now
    ):
        return False
    winner = rollout.candidate if state is RolloutState.DONE else rollout.stable
    edit = _edit({winner: WHOLE}, stable="")
    traffic.change(
        write, place, rollout.function, edit, action=action, message=f"{winner} gets all: {reason}"
    )
    number = repository.record_decision(write, rollout.id, step=rollout.step, decision=decision)
    ended = replace(rollout, state=state, reason=reason, finished_at=write.now)
    _notify(
        write, ended, _EVENTS[decision.verdict], decision.reasons, once=f"{rollout.id}/{number}"
    )
    return True


# -- manual operations -----------------------------------------------------------------------------
def pause(write: Write, rollout: Rollout, place: AppRef) -> None:
    """Keep a rollout at its step; a failure still rolls it back. Raises Conflict when it has
    ended."""
    _switch(write, rollout, RolloutState.PAUSED, place=place, action="rollout.pause")


def resume(write: Write, rollout: Rollout, place: AppRef) -> None:
    """Resume a paused rollout. Raises Conflict when it has ended."""
    _switch(write, rollout, RolloutState.RUNNING, place=place, action="rollout.resume")


def promote(write: Write, rollout: Rollout, place: AppRef) -> None:
    """Send all traffic to the candidate now, whatever the gates say. Raises Conflict when it has
    ended."""
    require_active(rollout)
    decision = Decision(
        verdict=Verdict.DONE, cause="by_hand", reasons=(f"promoted by {place.actor}",), weight=WHOLE
    )
    finish(
        write,
        rollout,
        state=RolloutState.DONE,
        decision=decision,
        place=place,
        action="rollout.promote",
    )


def abort(write: Write, rollout: Rollout, place: AppRef) -> None:
    """Send all traffic back to stable now. Raises Conflict when it has ended."""
    require_active(rollout)
    decision = Decision(
        verdict=Verdict.ROLLBACK, cause="by_hand", reasons=(f"aborted by {place.actor}",), weight=0
    )
    finish(
        write,
        rollout,
        state=RolloutState.ABORTED,
        decision=decision,
        place=place,
        action="rollout.rollback",
    )


def require_active(rollout: Rollout) -> None:
    """Raise Conflict unless the rollout is active."""
    if rollout.state.value not in ACTIVE:
        hint = (
            "`pilotlight app rollback` returns to the previous revision; a new deploy starts a new "
            "rollout."
        )
        raise Conflict(
            f"rollout {rollout.id} has ended: it is {rollout.state}",
            state=rollout.state.value,
            hint=hint,
        )


def _switch(
    write: Write, rollout: Rollout, state: RolloutState, *, place: AppRef, action: str
) -> None:
    require_active(rollout)
    if rollout.state is state:
        return
    repository.update(write, rollout, state=state.value)
    held = Decision(verdict=Verdict.HOLD, cause=state.value, reasons=(f"{state} by {place.actor}",))
    repository.record_decision(write, rollout.id, step=rollout.step, decision=held)
    subject = f"{place.subject}/{rollout.function}"
    audit_trail.record(
        write,
        tenant=place.tenant,
        actor=place.actor,
        action=action,
        subject=subject,
        request=place.request,
        before={"rollout": rollout.id, "state": rollout.state.value},
        after={"rollout": rollout.id, "state": state.value},
    )


# -- parts -----------------------------------------------------------------------------------------
def split(candidate: str, stable: str, weight: int) -> dict[str, int]:
    """Traffic weights with `weight` percent for the candidate."""
    return {name: share for name, share in ((stable, WHOLE - weight), (candidate, weight)) if share}


def _edit(
    weights: Mapping[str, int], *, stable: str
) -> Callable[[TrafficDocument], TrafficDocument]:
    return lambda document: replace(document, weights=weights, stable=stable)


def _stable_of(write: Write, place: AppRef, function: str, candidate: str) -> str:
    current = traffic.find(write.sql, place, function)
    known = repository.running(write.sql, place.function_id(function))
    stable = known.stable if known is not None else current.heaviest()
    if stable == candidate or not stable:
        what = f"{candidate} already serves" if stable else "no revision serves yet"
        hint = "Deploy without --canary to send all traffic to it at once."
        raise Conflict(
            f"{place.app}/{function}: {what}, so there is no revision to compare it with",
            revision=candidate,
            hint=hint,
        )
    return stable


def _spec(sql: sa.Connection, function_id: str, revision: str) -> FunctionSpec:
    table = tables.revisions
    text = sql.execute(
        sa.select(table.c.spec).where(table.c.function == function_id, table.c.name == revision)
    ).scalar_one_or_none()
    if text is None:
        raise NotFound(f"there is no revision {revision!r} of this function", revision=revision)
    return from_json(FunctionSpec, json.loads(text))


def _require_watched(plan: RolloutPlan, spec: FunctionSpec) -> None:
    """Raise InvalidInput for a gate on predictions that are not watched: it would hold for ever."""
    monitor = spec.log.monitor if spec.log is not None else None
    for gate in plan.gates:
        if gate.metric.startswith(QUALITY) and (monitor is None or not monitor.label):
            needed = "label"
        elif gate.metric == PREDICTION_KS and (monitor is None or not monitor.prediction):
            needed = "prediction"
        else:
            continue
        raise InvalidInput(
            f"rollout: {gate.metric}: {spec.name} is not deployed with "
            f"monitor=pilotlight.Monitor({needed}=…)",
            parameter="rollout",
        )


def _baseline(write: Write, rollout: Rollout) -> dict[str, Any]:
    revisions = (rollout.candidate, rollout.stable)
    return dict(
        evidence.this_minute(
            write.sql,
            tenant=rollout.tenant,
            function_id=rollout.function_id,
            revisions=revisions,
            now=write.now,
        )
    )


def _notify(
    write: Write, rollout: Rollout, event: str, reasons: tuple[str, ...], *, once: str
) -> None:
    body = {
        "rollout": rollout.id,
        "environment": rollout.environment,
        "app": rollout.app,
        "function": rollout.function,
        "candidate": rollout.candidate,
        "stable": rollout.stable,
        "state": rollout.state.value,
        "step": rollout.step,
        "weight": rollout.weight,
        "steps": to_json(rollout.plan)["steps"],
        "reasons": list(reasons),
    }
    deliveries.enqueue(
        write,
        tenant=rollout.tenant,
        environment=rollout.environment,
        event=event,
        body=body,
        once=f"{event} {once}",
    )
