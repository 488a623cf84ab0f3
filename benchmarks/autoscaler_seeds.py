"""Whom "auto" loses to on seeds that nothing was chosen on: the simulation of autoscaler_sim, trace
by trace and policy by policy.

"auto" *loses* to a policy on a seed if it uses more GPU time and its callers wait longer, on
average and at the 99th percentile, without a tolerance. The table counts those seeds, and has the
medians over the seeds of its GPU time and waits, divided by the other's. What was run is kept in
--results, one line of JSON per run, so that a run that was interrupted goes on where it was."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.autoscaler_sim import AUTO, HOURS, Run, arms, waits_of
from benchmarks.autoscaling.traces import TRACES

SEEDS = (5001, 5201)
"""First, and the one after the last: no rule and no parameter was chosen on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One arm under one trace: GPU time and waits, in seconds."""

    trace: str
    arm: str
    seed: int
    gpu_s: float
    mean_s: float
    p99_s: float

    def loses(self, other: Result) -> bool:
        """By more GPU time and longer waits, on average and at the 99th percentile."""
        return self.gpu_s > other.gpu_s and self.mean_s > other.mean_s and self.p99_s > other.p99_s


Results = Mapping[tuple[str, str, int], Result]


def result_of(run: Run) -> Result:
    """Run it."""
    books = run.books()
    waits = waits_of(books)
    return Result(
        trace=run.trace,
        arm=run.arm,
        seed=run.seed,
        gpu_s=books.gpu_s,
        mean_s=waits["mean"],
        p99_s=waits["p99"],
    )


def read(file: Path) -> dict[tuple[str, str, int], Result]:
    """The results of earlier runs."""
    lines = file.read_text().splitlines() if file.exists() else []
    results = (Result(**json.loads(line)) for line in lines)
    return {(one.trace, one.arm, one.seed): one for one in results}


def compared(results: Results, trace: str, arm: str) -> list[tuple[Result, Result]]:
    """ "auto" and another policy on the seeds that have both."""
    return [
        (own, results[trace, arm, seed])
        for (name, its, seed), own in sorted(results.items())
        if (name, its) == (trace, AUTO) and (trace, arm, seed) in results
    ]


def lines(results: Results) -> Iterator[str]:
    """The table."""
    yield f"{'':45} {'seeds':>5} {'lost':>5} {'GPU time':>9} {'mean wait':>9} {'p99':>6}  lost on"
    for trace in TRACES:
        for arm in arms():
            pairs = compared(results, trace, arm) if arm != AUTO else []
            if not pairs:
                continue
            lost = [own.seed for own, other in pairs if own.loses(other)]
            ratios = (
                median(ratio(getattr(own, what), getattr(other, what)) for own, other in pairs)
                for what in ("gpu_s", "mean_s", "p99_s")
            )
            numbers = "{:9.3f} {:9.3f} {:6.3f}".format(*ratios)
            yield (
                f"{f'{trace}: auto to {arm}':45} {len(pairs):5} {len(lost):5} {numbers}  "
                f"{', '.join(map(str, lost)) or '-'}"
            )


def ratio(own: float, other: float) -> float:
    """Of two times that may be zero: equal ones are 1."""
    return own / other if other else 1.0 if own == other else float("inf")


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing, and print the table of what there is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=SEEDS[0], help="seed")
    parser.add_argument("--end", type=int, default=SEEDS[1], help="the seed after the last")
    parser.add_argument("--trace", action="append", choices=TRACES, help="default: all")
    parser.add_argument("--arm", action="append", choices=arms(), help="default: all")
    parser.add_argument("--results", type=Path, required=True, metavar="FILE")
    given = parser.parse_args(argv)
    results = read(given.results)
    runs = [
        Run(trace=trace, arm=arm, seed=seed, hours=HOURS[trace])
        for seed in range(given.first, given.end)
        for trace in given.trace or TRACES
        for arm in dict.fromkeys((AUTO, *(given.arm or arms())))
        if (trace, arm, seed) not in results
    ]
    with given.results.open("a") as file, ProcessPoolExecutor() as processes:
        for one in processes.map(result_of, runs):
            results[one.trace, one.arm, one.seed] = one
            file.write(json.dumps(asdict(one)) + "\n")
            file.flush()
    print("\n".join(lines(results)))


if __name__ == "__main__":
    main()
