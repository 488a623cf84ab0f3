"""Decide whether a rollout advances: a pure function of its plan, its status and its evidence.

In this order: a hard failure of the candidate, or a gate that is proven broken, rolls back at once;
if stable is as bad, the rollout is halted with a notification instead. Then anything missing holds
it: traffic, recent observations, samples, proof, time. Otherwise it advances."""

from __future__ import annotations

from pilotlight.controller.rollouts import abort_conditions, metric_gates
from pilotlight.controller.rollouts.plan import RolloutPlan
from pilotlight.controller.rollouts.records import (
    Decision,
    GateOutcome,
    GateResult,
    RevisionEvidence,
    RolloutStatus,
    Verdict,
)
from pilotlight.spec.observations import count_eligible
from pilotlight.spec.traffic import WHOLE


def decide(
    plan: RolloutPlan,
    standing: RolloutStatus,
    candidate: RevisionEvidence,
    stable: RevisionEvidence,
    *,
    now: float,
) -> Decision:
    """The decision at this moment. `stable` covers the same minutes as `candidate`."""
    elapsed_s = max(0.0, now - standing.step_began_at)
    is_over = elapsed_s >= plan.every_s
    results = tuple(
        metric_gates.evaluate_gate(gate, plan, candidate, stable, is_over=is_over)
        for gate in plan.gates
    )
    ended = _ended_at_once(plan, candidate, stable, results)
    if ended is not None:
        return ended
    held = _held(plan, standing, candidate, stable, results=results, elapsed_s=elapsed_s)
    if held is not None:
        is_late = (
            elapsed_s >= plan.progress_deadline_s
            and not standing.is_told
            and not standing.is_paused
        )
        return Decision(
            verdict=Verdict.HOLD, cause=held[0], reasons=held[1], tell=is_late, gates=results
        )
    reasons = tuple(result.reason for result in results)
    if standing.step == len(plan.steps) - 1:
        return Decision(
            verdict=Verdict.DONE, cause="passed", reasons=reasons, weight=WHOLE, gates=results
        )
    return Decision(
        verdict=Verdict.ADVANCE,
        cause="passed",
        reasons=reasons,
        weight=plan.steps[standing.step + 1],
        gates=results,
    )


def _ended_at_once(
    plan: RolloutPlan,
    candidate: RevisionEvidence,
    stable: RevisionEvidence,
    results: tuple[GateResult, ...],
) -> Decision | None:
    failure = abort_conditions.find_abort_condition(candidate, plan.availability)
    broken = tuple(result.reason for result in results if result.outcome is GateOutcome.FAIL)
    if failure is None and not broken:
        return None
    reasons = (*((failure.reason,) if failure else ()), *broken)
    theirs = abort_conditions.find_abort_condition(stable, plan.availability)
    if theirs is not None:
        both = (*(f"candidate: {reason}" for reason in reasons), f"stable: {theirs.reason}")
        return Decision(
            verdict=Verdict.HALT, cause="both_bad", reasons=both, weight=0, gates=results
        )
    cause = failure.cause if failure else "gate"
    return Decision(verdict=Verdict.ROLLBACK, cause=cause, reasons=reasons, weight=0, gates=results)


def _held(
    plan: RolloutPlan,
    standing: RolloutStatus,
    candidate: RevisionEvidence,
    stable: RevisionEvidence,
    *,
    results: tuple[GateResult, ...],
    elapsed_s: float,
) -> tuple[str, tuple[str, ...]] | None:
    """The cause and reasons of a hold; None when nothing is missing."""
    if not count_eligible(candidate.step):
        beside = (
            f"; stable had {count_eligible(stable.step)}"
            if count_eligible(stable.step)
            else ", and neither did stable"
        )
        return "no_traffic", (
            f"the candidate had no calls in this step ({elapsed_s:.0f} s so far){beside}",
        )
    if not count_eligible(candidate.recent):
        return "metrics_missing", (
            "no observations of the candidate in the last 5 minutes: missing data is not a pass",
        )
    if lacking := tuple(
        result.reason for result in results if result.outcome is GateOutcome.NO_DATA
    ):
        return "samples", lacking
    if unclear := tuple(
        result.reason
        for result in results
        if result.outcome in (GateOutcome.UNCLEAR, GateOutcome.FAIL)
    ):
        return "unclear", unclear
    reasons = tuple(result.reason for result in results)
    if elapsed_s < plan.every_s:
        return "time", (f"{elapsed_s:.0f} of {plan.every_s:.0f} s of this step passed", *reasons)
    if standing.is_paused:
        return "paused", ("paused by an operator; it would advance otherwise", *reasons)
    return None
