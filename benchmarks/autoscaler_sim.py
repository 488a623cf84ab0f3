"""Autoscalers side by side: pilotlight's decider, Knative's KPA, a fixed keep-alive and a histogram
policy, on the same made-up traffic.

Discrete events on a clock that jumps (`benchmarks.autoscaling`): no machine is measured, the same
seeds give the same table anywhere. Each instance holds a GPU from its start to its end. Compared
are GPU-seconds, those of them that idled, how long calls waited, and starts.

"Equal wait" is made with the one knob that users have: of some values of `waiting_cost` beside
`scaledown_window="auto"` the smallest whose 99th percentile is not above KPA's, found on seeds of
its own and then shown on others.

A policy *loses* to another if it uses more GPU time and its callers wait longer, on average and at
the 99th percentile. How often "auto", the default, loses to any other is counted trace by trace and
seed by seed, by one measure of waits alone too; rows of others that lose to KPA say so. No parameter
was fitted to the seeds.

Where GPUs are too few our starts get them as the platform's own gate shares them out; the row
"placed in turn" is what becomes of that where Kubernetes' scheduler places pods instead, in the
order in which they came."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from benchmarks.autoscaling.placement import InTurn, Shared
from benchmarks.autoscaling.policies import HybridHistogram, KeepAlive, Kpa, KpaTerms, Pilotlight
from benchmarks.autoscaling.traces import TRACES, Trace, heavy_tailed
from benchmarks.autoscaling.world import Books, Fifo, Placement, Policy, Scaled, World
from benchmarks.harness import Options, Report, Row, options, percentile, phase
from pilotlight.spec.instances.scaling import AUTO_WINDOW_S, WAITING_COST, Scaling

SEEDS, TUNING_SEEDS = tuple(range(1001, 1011)), (101, 102)
"""Of what is shown, and of what equal waits are found on."""
COSTS = (0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 35.0, 60.0)
HOURS = {"steady": 0.5, "bursty": 1.0, "diurnal": 1.5, "heavy-tailed": 1.5, "spike": 0.75}
KEEP_ALIVES_S = (0.0, 30.0, 60.0, 300.0, 600.0)
KPA = "KPA, Knative's defaults"
AUTO = f"auto, waiting_cost={WAITING_COST:g}"
IN_TURN = "auto, pods placed in turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A policy with its settings, and how its starts get a GPU where there are too few."""

    policy: Callable[[Scaled], Policy]
    placement: Callable[[], Placement] = field(default=Fifo)


def pilotlight(
    *,
    waiting_cost: float | None = None,
    window_s: float = AUTO_WINDOW_S,
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


def keep_alive(window_s: float) -> Arm:
    """An instance goes after a fixed time without a call."""
    return Arm(policy=lambda scaled: KeepAlive(scaled, window_s=window_s))


def arms() -> dict[str, Arm]:
    """What every trace is run with."""
    return {
        AUTO: pilotlight(waiting_cost=WAITING_COST),
        "scaledown_window=60": pilotlight(window_s=60.0),
        KPA: Arm(policy=lambda scaled: Kpa(scaled, KpaTerms())),
        "KPA, utilisation 100 %": Arm(policy=lambda scaled: Kpa(scaled, KpaTerms(utilisation=1.0))),
        **{f"keep-alive of {window_s:g} s": keep_alive(window_s) for window_s in KEEP_ALIVES_S},
        "hybrid histogram": Arm(policy=HybridHistogram),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One arm under one trace."""

    trace: str
    arm: str
    seed: int
    hours: float

    def books(self) -> Books:
        """What comes of it."""
        given = {**arms(), IN_TURN: pilotlight(waiting_cost=WAITING_COST, placement=InTurn)}
        return run(given[self.arm], [TRACES[self.trace](self.seed, self.hours)])


def run_all(runs: Sequence[Run]) -> dict[Run, Books]:
    """All of them, on all processors."""
    with ProcessPoolExecutor() as processes:
        return dict(zip(runs, processes.map(Run.books, runs), strict=True))


def run(arm: Arm, traces: Sequence[Trace]) -> Books:
    """One arm under several traces, put together."""
    return sum_of(
        World(trace, policy=arm.policy, placement=arm.placement()).run() for trace in traces
    )


def sum_of(books: Iterable[Books]) -> Books:
    """Several runs, put together."""
    together = Books()
    for one in books:
        together.add(one)
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


def loses(books: Books, other: Books, measures: Sequence[str] = ("mean", "p99")) -> bool:
    """Uses more GPU time, and has its callers wait longer by each of the measures."""
    waits, others = waits_of(books), waits_of(other)
    return books.gpu_s > other.gpu_s and all(waits[one] > others[one] for one in measures)


def waits_of(books: Books) -> dict[str, float]:
    """The measures of waits, in seconds."""
    return {
        "mean": sum(books.waits_s) / len(books.waits_s),
        "p99": percentile(books.waits_s, 99),
    }


def count_losses(report: Report, books: Mapping[Run, Books]) -> None:
    """How often "auto" loses to another policy, trace by trace and seed by seed."""
    pairs = [
        (own, other)
        for own in books
        if own.arm in (AUTO, IN_TURN)
        for other in books
        if (other.trace, other.seed) == (own.trace, own.seed) and other.arm not in (AUTO, IN_TURN)
    ]
    for name, measures in (
        ("on both axes", ("mean", "p99")),
        ("by mean wait alone", ("mean",)),
        ("by p99 alone", ("p99",)),
    ):
        lost = [(own, to) for own, to in pairs if loses(books[own], books[to], measures)]
        told = Counter(f"{own.trace}: {own.arm}, to {to.arm}" for own, to in lost)
        report.remarks.append(
            f"{len(lost)} of {len(pairs)} comparisons lost {name}"
            + "".join(f"; {what}: {count}" for what, count in told.items())
        )


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
    seeds, tuning = (SEEDS[:1], TUNING_SEEDS[:1]) if given.quick else (SEEDS, TUNING_SEEDS)
    counted: dict[Run, Books] = {}
    for name in TRACES:
        with phase(name):
            books = run_all(_runs(name, seeds))
            counted |= books
            results = {
                arm: sum_of(books[one] for one in books if one.arm == arm)
                for arm in dict.fromkeys(one.arm for one in books)
            }
        if name == "heavy-tailed":
            with phase("equal wait"):
                tuned = [heavy_tailed(seed, HOURS[name]) for seed in tuning]
                cost = equal_wait(tuned, percentile(run(arms()[KPA], tuned).waits_s, 99))
                shown = [heavy_tailed(seed, HOURS[name]) for seed in seeds]
                equal = results[f"auto at KPA's wait, waiting_cost={cost:g}"] = run(
                    pilotlight(waiting_cost=cost), shown
                )
            _ratios(report, equal, results[KPA], results["KPA, utilisation 100 %"])
            report.remarks.append(
                f"equal wait: waiting_cost={cost:g} is the smallest of {COSTS} whose p99 is not "
                f"above KPA's on seeds {tuning}; "
                f"shown on seeds {seeds}"
            )
        add_rows(report, name, results)
    count_losses(report, counted)
    report.finish(given)


def _runs(trace: str, seeds: Sequence[int]) -> list[Run]:
    names = [*arms(), *([IN_TURN] if trace == "spike" else [])]
    return [
        Run(trace=trace, arm=name, seed=seed, hours=HOURS[trace])
        for seed in seeds
        for name in names
    ]


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
