"""Autoscalers side by side: pilotlight's decider, Knative's KPA and a fixed keep-alive, on the same
made-up traffic.

Discrete events on a clock that jumps (`benchmarks.autoscaling`): no machine is measured, the same
seeds give the same table anywhere. Each instance holds a GPU from its start to its end. Compared
are GPU-seconds, those of them that idled, how long calls waited, and starts.

"Equal wait" is made with the one knob that users have: of some values of `waiting_cost` beside
`scaledown_window="auto"` the smallest whose 99th percentile is not above KPA's, found on seeds of
its own and then shown on others. Rows in which a policy uses more GPU time than KPA *and* has its
callers wait longer say so. Where GPUs are too few our starts get them as the platform's own gate
shares them out; the row "placed in turn" is what becomes of that where Kubernetes' scheduler places
pods instead, in the order in which they came."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.autoscaling.placement import InTurn, Shared
from benchmarks.autoscaling.policies import KeepAlive, Kpa, KpaTerms, Pilotlight
from benchmarks.autoscaling.traces import TRACES, Trace, heavy_tailed
from benchmarks.autoscaling.world import Books, Fifo, Placement, Policy, Scaled, World
from benchmarks.harness import Options, Report, Row, options, percentile, phase
from pilotlight.sdk.options import LONGEST_AUTO_WINDOW_S, WAITING_COST
from pilotlight.spec.function import Scaling

SEEDS, TUNING_SEEDS = (1, 2, 3), (101, 102)
"""Of what is shown, and of what equal waits are found on."""
COSTS = (0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 35.0, 60.0)
HOURS = {"steady": 2.0, "bursty": 4.0, "diurnal": 6.0, "heavy-tailed": 6.0, "spike": 1.5}
QUICK = 0.25
"""Share of the hours, with one seed."""
KPA = "KPA, Knative's defaults"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A policy with its settings, and how its starts get a GPU where there are too few."""

    policy: Callable[[Scaled], Policy]
    placement: Callable[[], Placement] = field(default=Fifo)


def pilotlight(
    *,
    waiting_cost: float | None = None,
    window_s: float = LONGEST_AUTO_WINDOW_S,
    placement: Callable[[], Placement] = Shared,
) -> Arm:
    """Ours: `scaledown_window="auto"` with a waiting cost, else a fixed one."""

    def policy(scaled: Scaled) -> Policy:
        own = scaled.function
        scaling = Scaling(
            max_inputs=own.max_inputs,
            max_instances=own.max_instances,
            scaledown_window_s=window_s,
            waiting_cost=waiting_cost,
        )
        return Pilotlight(scaled, scaling)

    return Arm(policy=policy, placement=placement)


def arms() -> dict[str, Arm]:
    """What every trace is run with."""
    return {
        f"auto, waiting_cost={WAITING_COST:g}": pilotlight(waiting_cost=WAITING_COST),
        "scaledown_window=60": pilotlight(window_s=60.0),
        KPA: Arm(policy=lambda scaled: Kpa(scaled, KpaTerms())),
        "KPA, utilisation 100 %": Arm(policy=lambda scaled: Kpa(scaled, KpaTerms(utilisation=1.0))),
        "keep-alive of 60 s": Arm(policy=KeepAlive),
    }


def run(arm: Arm, traces: Sequence[Trace]) -> Books:
    """One arm under several traces, put together."""
    together = Books()
    for trace in traces:
        together.add(World(trace, policy=arm.policy, placement=arm.placement()).run())
    return together


def equal_wait(traces: Sequence[Trace], p99_s: float) -> float:
    """The smallest of COSTS whose 99th percentile is not above `p99_s`; the largest where none is.
    Waits fall as costs rise: bisected."""
    low, high = 0, len(COSTS) - 1
    while low < high:
        middle = (low + high) // 2
        if percentile(run(pilotlight(waiting_cost=COSTS[middle]), traces).waits_s, 99) <= p99_s:
            high = middle
        else:
            low = middle + 1
    return COSTS[low]


def loses(books: Books, kpa: Books) -> bool:
    """Worse than KPA on both axes at once."""
    return books.gpu_s > kpa.gpu_s and percentile(books.waits_s, 99) > percentile(kpa.waits_s, 99)


def add_rows(report: Report, trace: str, results: Mapping[str, Books]) -> None:
    """One line per arm."""
    kpa = results[KPA]
    for name, books in results.items():
        note = (
            f"{books.gpu_s / 3600:6.1f} GPU h, {books.idle_s / 3600:6.1f} idle, "
            f"{books.starting_s / 3600:5.1f} starting; "
            f"{books.starts} starts; mean wait {sum(books.waits_s) / len(books.waits_s):.2f} s"
        )
        if name != KPA and loses(books, kpa):
            note += "; LOSES to KPA on both axes"
        report.rows.append(Row.of(f"{trace}: {name}", "s waited", books.waits_s, note))


def main(given: Options) -> None:
    """Run everything and print it."""
    report = Report("autoscalers, simulated: waits, and what they cost")
    share, seeds, tuning = (
        (QUICK, SEEDS[:1], TUNING_SEEDS[:1]) if given.quick else (1.0, SEEDS, TUNING_SEEDS)
    )
    for name, make in TRACES.items():
        traces = [
            make(seed, HOURS[name] * share if name != "spike" else HOURS[name] * max(share, 0.5))
            for seed in seeds
        ]
        with phase(name):
            results = {arm_name: run(arm, traces) for arm_name, arm in arms().items()}
        if name == "heavy-tailed":
            with phase("equal wait"):
                tuned = [heavy_tailed(seed, HOURS[name] * share) for seed in tuning]
                cost = equal_wait(tuned, percentile(run(arms()[KPA], tuned).waits_s, 99))
                equal = results[f"auto at KPA's wait, waiting_cost={cost:g}"] = run(
                    pilotlight(waiting_cost=cost), traces
                )
            _ratios(report, equal, results[KPA], results["KPA, utilisation 100 %"])
            report.remarks.append(
                f"equal wait: waiting_cost={cost:g} is the smallest of {COSTS} whose p99 is not "
                f"above KPA's on seeds {tuning}; "
                f"shown on seeds {seeds}"
            )
        if traces[0].gpus is not None:
            results["auto, pods placed in turn"] = run(
                pilotlight(waiting_cost=WAITING_COST, placement=InTurn), traces
            )
        add_rows(report, name, results)
    report.finish(given)


def _ratios(report: Report, equal: Books, kpa: Books, tight: Books) -> None:
    report.ratio("idle_gpu_s_vs_kpa", equal.idle_s / kpa.idle_s)
    report.ratio("p99_wait_vs_kpa", percentile(equal.waits_s, 99) / percentile(kpa.waits_s, 99))
    report.ratio("gpu_s_vs_kpa", equal.gpu_s / kpa.gpu_s)
    report.ratio("idle_gpu_s_vs_kpa_at_100", equal.idle_s / tight.idle_s)
    report.ratio(
        "p99_wait_vs_kpa_at_100", percentile(equal.waits_s, 99) / percentile(tight.waits_s, 99)
    )


if __name__ == "__main__":
    main(options(__doc__ or ""))
