"""The report of a plan as JSON values: what was measured, the plan, its cost, and warnings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pilotlight.capacity import instance_model, planner
from pilotlight.capacity.instance_model import InstanceModel, TokenTimes
from pilotlight.capacity.measurements import MeasuredCall, Measurements
from pilotlight.capacity.nodes import Room
from pilotlight.capacity.planner import CapacityPlan, Constraint, Demand, Prediction
from pilotlight.errors import InvalidInput
from pilotlight.loadtest.distributions import LengthDistribution
from pilotlight.loadtest.results import nearest_rank, summary

MIN_CALLS = 20
"""Fewer say nothing of a 99th percentile."""
ENOUGH_CALLS = 1_000
"""Ten calls are beyond the 99th percentile of so many."""
_DRIFT = 1.3
"""Ratio of the medians of the first and last quarter of calls that is reported."""
_MORE, _SOME = 1.5, 0.25
"""Calls at once on average that are reported: so many times the measured ones, and so many more."""
_LOAD = 1.5
"""Load of this machine, per core, that is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths of prompts and answers, in tokens; None: as measured."""

    tokens_in: LengthDistribution | None = None
    tokens_out: LengthDistribution | None = None

    @property
    def are_given(self) -> bool:
        """Whether any was given."""
        return self.tokens_in is not None or self.tokens_out is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What surrounds the function.

    Attributes:
        room: of the nodes; None = not known to this key.
        load: of this machine, if it is the platform's, and `cores` its processors; None elsewhere.
    """

    room: Room | None = None
    load: float | None = None
    cores: int | None = None


def make_report(
    name: str,
    measured: Measurements,
    *,
    rate_per_s: float,
    p99_ms: float,
    headroom: float,
    zones: int,
    growth_per_min: float,
    lengths: Lengths,
    around: Surroundings,
) -> dict[str, Any]:
    """Plan, and return the report. Raises InvalidInput where too little was measured
    (`require_calls`)."""
    require_calls(name, measured)
    model = instance_model.estimate(measured.calls, slots=measured.slots)
    times = instance_model.token_times(measured.calls, model.works)
    if lengths.are_given:
        model = _of_lengths(name, measured, model, times, lengths)
    starts = [ms for found in measured.starts_ms.values() for ms in found]
    demand = Demand(
        rate_per_s=_uncached(measured, rate_per_s),
        p99_ms=p99_ms,
        headroom=headroom,
        zones=zones,
        growth_per_min=growth_per_min,
        start_ms=nearest_rank(sorted(starts), planner.SHARE) if starts else None,
    )
    shortfall = planner.shortfall_ms(model, p99_ms)
    found = planner.plan(model, demand) if shortfall is None else None
    return {
        "function": name,
        "revision": measured.revision,
        "asked": {
            "rate_per_s": rate_per_s,
            "p99_ms": p99_ms,
            "headroom": headroom,
            "zones": zones,
            "growth_per_min": growth_per_min,
            "tokens_in": lengths.tokens_in and lengths.tokens_in.text,
            "tokens_out": lengths.tokens_out and lengths.tokens_out.text,
        },
        "measured": _measured(measured, model, times, demand),
        "plan": None if found is None else _plan(found, measured, around.room),
        "cost_per_day": None if found is None else _cost(found, measured, lengths),
        "warnings": [
            *_impossible(p99_ms, shortfall, is_planned=found is not None),
            *_thin_evidence(measured, model, times, lengths),
            *_busy_machine(measured, around),
            *([] if found is None else _other_load(found, measured, model)),
            *([] if found is None else _too_little_room(found, measured, demand, around.room)),
        ],
    }


def require_calls(name: str, measured: Measurements) -> None:
    """Raises InvalidInput for too few calls."""
    if len(measured.calls) < MIN_CALLS:
        raise InvalidInput(
            f"{name} has {len(measured.calls)} measured calls of revision {measured.revision} in "
            f"this time, and a plan needs {MIN_CALLS}",
            hint=f"Measure some with `pilotlight loadtest {name}`, or name an earlier --since.",
        )


def _uncached(measured: Measurements, rate_per_s: float) -> float:
    """The calls per second that reach instances, if the response cache answers the measured share
    of them."""
    served = len(measured.calls) + measured.cold + measured.failed
    return rate_per_s * served / (served + measured.cached)


def _of_lengths(
    name: str,
    measured: Measurements,
    model: InstanceModel,
    times: TokenTimes | None,
    lengths: Lengths,
) -> InstanceModel:
    if times is None:
        why = (
            "none of its measured calls was streamed"
            if measured.is_language_model
            else "it is no language model"
        )
        raise InvalidInput(
            f"{name}: times by token are not known, because {why}",
            hint="Leave out --tokens-in and --tokens-out, or measure streamed calls with "
            "`pilotlight loadtest`.",
        )
    works = instance_model.works_of_lengths(
        measured.calls,
        model.works,
        times,
        tokens_in=lengths.tokens_in,
        tokens_out=lengths.tokens_out,
    )
    return InstanceModel(
        slowdown=model.slowdown, measured=model.measured, slots=model.slots, works=works
    )


# -- parts -----------------------------------------------------------------------------------------
def _measured(
    measured: Measurements, model: InstanceModel, times: TokenTimes | None, demand: Demand
) -> dict[str, Any]:
    calls = measured.calls
    firsts = [call.first_ms for call in calls if call.first_ms is not None]
    return {
        "since": calls[0].at,
        "until": calls[-1].at,
        "is_cut": measured.is_cut,
        "calls": len(calls),
        "failed": measured.failed,
        "cold": measured.cold,
        "cached": measured.cached,
        "exec_ms": summary([call.exec_ms for call in calls]),
        "work_ms": summary([work.whole_ms for work in model.works]),
        "scv": model.scv,
        "slots": model.slots,
        "calls_at_once": model.measured,
        "slowdown": model.slowdown,
        "max_rate_per_s": model.max_rate_per_s,
        "first_token_ms": summary(firsts),
        "token_times": None if times is None else asdict(times),
        "tokens_in": _mean([call.tokens_in for call in calls]),
        "tokens_out": _mean([call.tokens_out for call in calls]),
        "starts_ms": {kind: summary(found) for kind, found in measured.starts_ms.items()},
        "start_ms": demand.start_ms,
    }


def _plan(found: CapacityPlan, measured: Measurements, room: Room | None) -> dict[str, Any]:
    expected = found.expected
    is_full = room is not None and found.total > room.instances
    return {
        "instances": found.total,
        "serving": found.serving,
        "reserve": found.reserve,
        "per_zone": found.per_zone,
        "gpus": found.total * measured.gpu_count,
        "constraint": room.resource if room is not None and is_full else found.constraint.value,
        "room": None if room is None else room.instances,
        "p50_ms": expected.p50_ms,
        "p99_ms": expected.p99_ms,
        "first_p99_ms": expected.first_p99_ms,
        "load_test": _load_test(expected),
        "p99_at_headroom_ms": found.at_headroom.p99_ms,
        "waited": expected.waited,
        "busy": expected.busy,
        "method": "simulation" if expected.is_simulated else "formula",
    }


def _load_test(expected: Prediction) -> dict[str, float] | None:
    if expected.test_p99_ms is None:
        return None
    low, high = expected.test_p99_ms
    return {"calls": planner.TEST_CALLS, "p99_low_ms": low, "p99_high_ms": high}


def _cost(found: CapacityPlan, measured: Measurements, lengths: Lengths) -> dict[str, Any] | None:
    prices = measured.prices
    if prices is None:
        return None
    cost = planner.daily_cost(
        prices,
        found.expected,
        total=found.total,
        tokens_in=_mean_length(lengths.tokens_in, [call.tokens_in for call in measured.calls]),
        tokens_out=_mean_length(lengths.tokens_out, [call.tokens_out for call in measured.calls]),
    )
    parts = {"busy": cost.busy, "reserved": cost.reserved, "calls": cost.calls, "total": cost.total}
    return {
        "currency": prices.currency,
        "price_version": prices.version,
        **{name: str(round(amount, 6)) for name, amount in parts.items()},
    }


def _mean_length(given: LengthDistribution | None, measured: Sequence[int]) -> float:
    return _mean(measured) if given is None else given.mean()


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)


# -- warnings --------------------------------------------------------------------------------------
def _impossible(p99_ms: float, shortfall: float | None, *, is_planned: bool) -> Iterator[str]:
    if shortfall is not None:
        yield (
            f"impossible: with no other call the 99th percentile is {p99_ms + shortfall:.1f} ms, "
            f"{shortfall:.1f} ms more than {p99_ms:g} ms, however many instances there are: make "
            f"the function faster"
        )
    elif not is_planned:
        yield (
            f"impossible: calls that run at once exceed {p99_ms:g} ms with any number of "
            f"instances: allow more time, or make the function faster"
        )


def _thin_evidence(
    measured: Measurements, model: InstanceModel, times: TokenTimes | None, lengths: Lengths
) -> Iterator[str]:
    calls = measured.calls
    if len(calls) < ENOUGH_CALLS:
        yield (
            f"only {len(calls)} calls were measured: a 99th percentile needs some {ENOUGH_CALLS}"
        )
    if model.slots > model.measured:
        yield (
            f"at most {model.measured} of {model.slots} calls ran at once on an instance: it is "
            f"not assumed to do more work with more of them; measure at a higher rate to know"
        )
    if measured.failed > len(calls) / 20:
        yield f"{measured.failed} calls failed, and are left out"
    if not measured.starts_ms:
        yield "no start was measured, so the reserve for growing rates is not known"
    for option, given, known in (
        ("--tokens-in", lengths.tokens_in, 0 if times is None else times.max_in),
        ("--tokens-out", lengths.tokens_out, 0 if times is None else times.max_out),
    ):
        if given is not None and given.mean() > known:
            yield f"{option} {given.text} is beyond the measured lengths (at most {known} tokens)"
    if measured.prices is not None and measured.prices.rounds:
        yield "prices round the durations of calls up: calls cost more than their time"


def _other_load(found: CapacityPlan, measured: Measurements, model: InstanceModel) -> Iterator[str]:
    """An instance that has more calls at once than it was measured with may slow them down more."""
    planned = found.expected.at_once
    known = _mean([call.found for call in measured.calls])
    if model.slots > 1 and planned is not None and planned > _MORE * known + _SOME:
        rate = found.expected.rate_per_s / found.serving
        yield (
            f"an instance will have {planned:.1f} calls at once on average, and had {known:.1f} "
            f"when it was measured: measure one at {rate:.3g} calls/s"
        )


def _busy_machine(measured: Measurements, around: Surroundings) -> Iterator[str]:
    quarter = len(measured.calls) // 4
    first, last = measured.calls[:quarter], measured.calls[-quarter:]
    before, after = _median(first), _median(last)
    if max(before, after) > _DRIFT * min(before, after):
        yield (
            f"calls took {before:.1f} ms at first and {after:.1f} ms at last (medians): the "
            f"machine was busy, or arguments differ; choose another time with --since"
        )
    if around.load is not None and around.cores and around.load > _LOAD * around.cores:
        yield (
            f"this machine has a load of {around.load:.1f} on {around.cores} processors: times "
            f"that are measured now are longer than on a quiet one"
        )


def _median(calls: Sequence[MeasuredCall]) -> float:
    return nearest_rank(sorted(call.exec_ms for call in calls), 0.5)


def _too_little_room(
    found: CapacityPlan, measured: Measurements, demand: Demand, room: Room | None
) -> Iterator[str]:
    if found.total > measured.max_instances:
        most = measured.max_instances
        yield f"max_instances={most} allows fewer: set it to {found.total} or more"
    if room is not None and found.total > room.instances:
        yield f"the nodes hold {room.instances} instances, by {room.resource}"
    if room is not None and room.cpus is not None:
        cores = found.expected.busy * measured.cpu
        if cores > room.cpus:
            yield (
                f"its busy instances use {cores:.1f} processors and the nodes have {room.cpus}: "
                f"calls take longer than measured"
            )
    if found.constraint is Constraint.RATE and not demand.headroom:
        yield "without headroom a plan that the rate decides is overloaded by any growth"
