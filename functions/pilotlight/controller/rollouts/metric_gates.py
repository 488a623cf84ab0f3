"""Evaluation of one metric gate: is the candidate proven worse than its limit, good enough to
advance, or not yet known?

FAIL is a proof by a test that stays valid however often it is evaluated (`sequential_tests`). PASS
needs the plan's number of samples and an estimate within the limit. Everything between holds. The
limit is stable's number made worse by the allowed share or by the slack, whichever is more, so both
must be exceeded before a gate fails.

Calls that share an instance share its price, so a call costs more where there are fewer of them,
whatever the revision. While the candidate has fewer calls than stable, its cost is therefore also
compared as if each call had an instance to itself, and the more favorable comparison counts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pilotlight.controller.rollouts.plan import (
    FEEDBACK,
    PREDICTION_KS,
    QUALITY,
    Gate,
    GateKind,
    RolloutPlan,
    metric_of,
)
from pilotlight.controller.rollouts.records import GateOutcome, GateResult, RevisionEvidence
from pilotlight.controller.statistics import distributions, sequential_tests
from pilotlight.controller.statistics.sequential_tests import Sample
from pilotlight.spec.observations import (
    Observation,
    count_eligible,
    count_errors,
    latency_bucket,
    latency_quantile_ms,
)
from pilotlight.spec.pricing import COST_QUANTUM

MIN_CALLS = 30
"""Minimum number of candidate calls for a proof."""
EQUAL_LOAD = 0.8
"""Share of stable's calls. A candidate with at least this share uses its instances as fully as
stable does, and only the billed cost counts."""
_CLOCK = {"latency": "warm", "first_byte": "first_byte", "cold": "cold"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proportion:
    """Hits among trials, such as errors among calls."""

    hits: int
    trials: int

    @property
    def value(self) -> float | None:
        """None without trials."""
        return self.hits / self.trials if self.trials else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A gate's numbers, and whether they prove that the candidate is worse."""

    candidate: float | None
    stable: float | None
    limit: float | None
    samples: int
    is_worse: bool
    note: str = ""


def evaluate_gate(
    gate: Gate,
    plan: RolloutPlan,
    candidate: RevisionEvidence,
    stable: RevisionEvidence,
    *,
    is_over: bool,
) -> GateResult:
    """Evaluate one gate. `is_over`: the step's time has passed, so the gain that pays for a trade
    must be proven by now."""
    extra = (
        0.0
        if gate.kind is GateKind.VETO
        else gate.exchange * min(gain(gate.paid_by, plan, candidate, stable), gate.at_most)
    )
    bought = min(extra, gate.at_most)
    proof = prove(gate, plan, candidate, stable, bought=bought)
    outcome = _outcome(gate, plan, proof)
    if outcome is GateOutcome.FAIL and gate.kind is GateKind.TRADE and not is_over:
        beyond_price = prove(gate, plan, candidate, stable, bought=gate.at_most)
        outcome = GateOutcome.FAIL if beyond_price.is_worse else GateOutcome.UNCLEAR
    return GateResult(
        metric=gate.metric,
        kind=gate.kind.value,
        outcome=outcome,
        candidate=proof.candidate,
        stable=proof.stable,
        limit=proof.limit,
        samples=proof.samples,
        reason=_reason(gate, plan, proof, outcome, bought),
    )


def prove(
    gate: Gate,
    plan: RolloutPlan,
    candidate: RevisionEvidence,
    stable: RevisionEvidence,
    *,
    bought: float,
) -> Proof:
    """Test this gate's metric. `bought`: relative worsening that a gain has paid for."""
    if gate.metric == PREDICTION_KS:
        return _prove_distance(gate, plan, candidate, stable)
    if gate.metric.startswith((FEEDBACK, QUALITY)):
        return _prove_mean(
            gate,
            plan,
            feedback_of(candidate, gate.metric),
            feedback_of(stable, gate.metric),
            bought,
        )
    if gate.metric.startswith("cost_"):
        return _prove_cost(gate, plan, candidate, stable, bought)
    if gate.metric.endswith("_ratio"):
        return _prove_share(
            gate,
            plan,
            share_of(candidate.step, gate.metric),
            share_of(stable.step, gate.metric),
            bought,
        )
    return _prove_quantile(gate, plan, candidate.step, stable.step, bought)


def share_of(seen: Observation, metric: str) -> Proportion:
    """The share that a `*_ratio` metric measures. None counts refused or cancelled calls."""
    match metric:
        case "error_ratio":
            return Proportion(hits=count_errors(seen), trials=count_eligible(seen))
        case "degraded_ratio":
            return Proportion(hits=seen.degraded, trials=seen.answered)
    return Proportion(hits=seen.streams - seen.streams_completed, trials=seen.streams)


def cost_of(seen: Observation, metric: str) -> Sample:
    """Mean cost, in money. Only sums are recorded, so the spread is taken from the execution times,
    to which the cost is proportional."""
    return _per_unit(seen, metric, seen.cost_picos * float(COST_QUANTUM))


def alone_of(seen: RevisionEvidence, metric: str) -> Sample:
    """Mean cost as if each call had an instance to itself; empty if the instance's price is
    unknown."""
    return _per_unit(seen.step, metric, seen.step.exec_ms / 1000 * seen.price)


def _per_unit(seen: Observation, metric: str, cost: float) -> Sample:
    units = (
        seen.calls_billed
        if metric == "cost_per_call"
        else (seen.tokens_in + seen.tokens_out) / 1000
    )
    if not seen.calls_billed or not units or not cost:
        return Sample(n=0, mean=0.0, variance=0.0)
    mean = cost / units
    return Sample(
        n=seen.calls_billed,
        mean=mean,
        variance=(mean * sequential_tests.spread(seen.latency.get("exec", {}))) ** 2,
    )


def feedback_of(seen: RevisionEvidence, metric: str) -> Sample:
    """Feedback of callers on this metric, or predictions against it."""
    empty = Sample(n=0, mean=0.0, variance=0.0)
    if metric.startswith(QUALITY):
        return seen.quality.get(metric.removeprefix(QUALITY), empty)
    return seen.feedback.get(metric.removeprefix(FEEDBACK), empty)


def clock_of(metric: str) -> tuple[str, float]:
    """The clock and the quantile of a percentile metric: `latency_p99` → (`warm`, 0.99)."""
    name, _, percent = metric.rpartition("_p")
    return _CLOCK[name], int(percent) / 100


def gain(
    metric: str, plan: RolloutPlan, candidate: RevisionEvidence, stable: RevisionEvidence
) -> float:
    """Proven relative gain of the candidate; 0 without proof. A share or percentile that dropped
    to zero gains 1."""
    threshold = math.log(1 / plan.alpha)
    if metric.startswith((FEEDBACK, QUALITY, "cost_")):
        of = (
            feedback_of
            if metric.startswith((FEEDBACK, QUALITY))
            else lambda seen, name: cost_of(seen.step, name)
        )
        ours, theirs = of(candidate, metric), of(stable, metric)
        if min(ours.n, theirs.n) < plan.min_samples or not theirs.mean:
            return 0.0
        better = (
            ours.mean - theirs.mean
            if metric_of(metric).is_higher_better
            else theirs.mean - ours.mean
        )
        width = sequential_tests.boundary(ours.n, plan.min_samples, plan.alpha) * math.hypot(
            ours.se, theirs.se
        )
        return max(0.0, (better - width) / abs(theirs.mean))
    if metric.endswith("_ratio"):
        us, them = share_of(candidate.step, metric), share_of(stable.step, metric)
        if us.value is None or not them.value or us.trials < plan.min_samples:
            return 0.0
        is_proven = (
            sequential_tests.log_e_ratio((them.hits, us.hits), (them.trials, us.trials), 1.0)
            >= threshold
        )
        return max(0.0, 1 - us.value / them.value) if is_proven else 0.0
    clock, share = clock_of(metric)
    upper = sequential_tests.upper_quantile(candidate.step.latency.get(clock, {}), share)
    lower = sequential_tests.lower_quantile(stable.step.latency.get(clock, {}), share)
    return max(0.0, 1 - upper / lower) if upper is not None and lower else 0.0


def _prove_share(
    gate: Gate, plan: RolloutPlan, ours: Proportion, theirs: Proportion, bought: float
) -> Proof:
    limit = _limit(gate, theirs.value, bought)
    threshold, is_worse = math.log(1 / plan.alpha), False
    if (
        ours.value is not None
        and ours.trials >= MIN_CALLS
        and limit is not None
        and ours.value > limit
    ):
        is_worse = (
            gate.max is not None
            and ours.value > gate.max
            and _log_e_above(ours, gate.max) >= threshold
        )
        if (allowed := gate.allowed_increase) is not None:
            log_e = sequential_tests.log_e_ratio(
                (ours.hits, theirs.hits), (ours.trials, theirs.trials), 1 + allowed + bought
            )
            is_worse = is_worse or (
                log_e >= threshold and ours.value > _relative(gate, theirs.value or 0.0, bought)
            )
    return Proof(
        candidate=ours.value,
        stable=theirs.value,
        limit=limit,
        samples=ours.trials,
        is_worse=is_worse,
    )


def _log_e_above(share: Proportion, bound: float) -> float:
    return math.inf if bound <= 0 else sequential_tests.log_e_share(share.hits, share.trials, bound)


def _prove_quantile(
    gate: Gate, plan: RolloutPlan, ours: Observation, theirs: Observation, bought: float
) -> Proof:
    """Test the share of calls slower than the limit, which may be at most 1 - share; valid for any
    distribution."""
    clock, share = clock_of(gate.metric)
    mine, other = ours.latency.get(clock, {}), theirs.latency.get(clock, {})
    n = sum(mine.values())
    limit = _limit(gate, sequential_tests.upper_quantile(other, share), bought)
    is_worse = False
    if limit is not None and n >= MIN_CALLS:
        slow = sum(count for bucket, count in mine.items() if bucket > latency_bucket(limit))
        is_worse = sequential_tests.log_e_share(slow, n, 1 - share) >= math.log(1 / plan.alpha)
    return Proof(
        candidate=latency_quantile_ms(mine, share),
        stable=latency_quantile_ms(other, share),
        limit=limit,
        samples=n,
        is_worse=is_worse,
    )


def _prove_cost(
    gate: Gate,
    plan: RolloutPlan,
    candidate: RevisionEvidence,
    stable: RevisionEvidence,
    bought: float,
) -> Proof:
    billed = _prove_mean(
        gate, plan, cost_of(candidate.step, gate.metric), cost_of(stable.step, gate.metric), bought
    )
    ours, theirs = alone_of(candidate, gate.metric), alone_of(stable, gate.metric)
    if (
        candidate.step.calls_billed >= EQUAL_LOAD * stable.step.calls_billed
        or not ours.n
        or not theirs.n
    ):
        return billed
    alone = replace(
        _prove_mean(gate, plan, ours, theirs, bought),
        note=", as if each call had an instance to itself",
    )
    return min(billed, alone, key=_badness)


def _badness(proof: Proof) -> float:
    return (
        proof.candidate / proof.limit if proof.candidate is not None and proof.limit else math.inf
    )


def _prove_mean(
    gate: Gate, plan: RolloutPlan, ours: Sample, theirs: Sample, bought: float
) -> Proof:
    limit = _limit(gate, theirs.mean if theirs.n else None, bought)
    sign = -1 if metric_of(gate.metric).is_higher_better else 1
    is_worse = False
    if limit is not None and ours.n >= MIN_CALLS:
        factor = (
            0.0
            if gate.allowed_increase is None
            else 1 + sign * min(gate.allowed_increase + bought, 1e6)
        )
        se = math.hypot(ours.se, abs(factor) * theirs.se if theirs.n else 0.0)
        is_worse = (
            sign * (ours.mean - limit)
            > sequential_tests.boundary(ours.n, plan.min_samples, plan.alpha) * se
        )
    return Proof(
        candidate=ours.mean if ours.n else None,
        stable=theirs.mean if theirs.n else None,
        limit=limit,
        samples=ours.n,
        is_worse=is_worse,
    )


def _prove_distance(
    gate: Gate, plan: RolloutPlan, candidate: RevisionEvidence, stable: RevisionEvidence
) -> Proof:
    """Test the distance of both revisions' predictions, less what chance may add to it at any
    time."""
    ours, theirs = candidate.predictions, stable.predictions
    if ours is None or theirs is None or not ours.present or not theirs.present:
        samples = ours.present if ours is not None else 0
        return Proof(candidate=None, stable=None, limit=None, samples=samples, is_worse=False)
    limit = _limit(gate, 0.0, 0.0)
    distance = distributions.ks(ours, theirs)
    chance = sum(distributions.ks_radius(one.present, plan.alpha / 2) for one in (ours, theirs))
    return Proof(
        candidate=distance,
        stable=None,
        limit=limit,
        samples=min(ours.present, theirs.present),
        is_worse=limit is not None and distance - chance > limit,
    )


def _limit(gate: Gate, stable: float | None, bought: float) -> float | None:
    """The candidate's limit; None while it depends on a number that stable does not have yet."""
    own = gate.min if metric_of(gate.metric).is_higher_better else gate.max
    if gate.allowed_increase is None:
        return own
    if stable is None:
        return None
    relative = _relative(gate, stable, bought)
    if own is None:
        return relative
    return max(own, relative) if metric_of(gate.metric).is_higher_better else min(own, relative)


def _relative(gate: Gate, stable: float, bought: float) -> float:
    worse = abs(stable) * ((gate.allowed_increase or 0.0) + bought)
    off = max(worse, gate.allowed_slack)
    return stable - off if metric_of(gate.metric).is_higher_better else stable + off


def _outcome(gate: Gate, plan: RolloutPlan, proof: Proof) -> GateOutcome:
    if proof.is_worse:
        return GateOutcome.FAIL
    if proof.candidate is None or proof.limit is None or proof.samples < plan.min_samples:
        return GateOutcome.NO_DATA
    is_within = (
        proof.candidate >= proof.limit
        if metric_of(gate.metric).is_higher_better
        else proof.candidate <= proof.limit
    )
    return GateOutcome.PASS if is_within else GateOutcome.UNCLEAR


def _reason(
    gate: Gate, plan: RolloutPlan, proof: Proof, outcome: GateOutcome, bought: float
) -> str:
    name, unit = gate.metric, metric_of(gate.metric).unit
    if proof.candidate is None or proof.limit is None:
        whose = "the candidate" if proof.candidate is None else "stable"
        return f"{name}: no data from {whose} yet"
    than = f", stable {shown(proof.stable, unit)}" if proof.stable is not None else ""
    paid = f", {bought:.1%} of it paid for by {gate.paid_by}" if bought else ""
    numbers = (
        f"{name}: {shown(proof.candidate, unit)}{than}, limit "
        f"{shown(proof.limit, unit)}{paid}{proof.note}"
    )
    match outcome:
        case GateOutcome.FAIL:
            return (
                f"{numbers}: worse, with a false alarm rate of {plan.alpha:.2g}, after "
                f"{proof.samples} samples"
            )
        case GateOutcome.NO_DATA:
            return f"{numbers}: {proof.samples} of {plan.min_samples} samples"
        case GateOutcome.UNCLEAR:
            return (
                f"{numbers}: outside the limit, but {proof.samples} samples do not prove it worse"
            )
    return f"{numbers}: within the limit after {proof.samples} samples"


def shown(value: float | None, unit: str) -> str:
    """Format a number with its unit."""
    if value is None:
        return "none"
    match unit:
        case "share":
            return f"{value:.2%}"
        case "ms":
            return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"
        case "money":
            return f"{value:.3g}"
    return f"{value:.4g}"
