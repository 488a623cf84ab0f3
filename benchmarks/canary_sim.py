"""Are bad canaries caught, and good ones let through? The judge of rollouts against a thousand
simulated ones of each kind.

A function gets calls at random (Poisson), so many a second; each second the judge sees what a
controller would, and its decision is followed. Latencies are lognormal with a tail of slow calls; a
call costs what its time does. The same code judges as in the controller
(`pilotlight.controller.rollouts`); only the calls are made up.

A good candidate differs from stable by chance alone: each one that is rolled back is a false alarm,
whose rate the plan bounds. A bad one fails 2 % of its calls, stable 0.1 %."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Report, Row, options, phase
from pilotlight.controller.rollouts.decision import decide
from pilotlight.controller.rollouts.plan import RolloutPlan
from pilotlight.controller.rollouts.records import (
    Decision,
    RevisionEvidence,
    RolloutStatus,
    Verdict,
)
from pilotlight.spec.observations import GROWTH, Observation

RUNS, QUICK_RUNS = 1000, 100
CALLS_PER_S = 100
PLAN = RolloutPlan()
"""As `--canary 5,25,50,100 --every 5m` without further options."""
GIVE_UP_S = 4 * 3600
"""A rollout that holds for so long is counted as held."""
RECENT_S = 300
CHUNK_S = 300
"""Seconds that are drawn at once."""
BUCKETS = 80
"""Up to GROWTH**80 ms, two seconds."""
PICOS_PER_MS = 1000
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """What a revision is like: its share of errors, the median of its warm latency, and the price
    of its time against stable's."""

    errors: float = 0.001
    median_ms: float = 30.0
    price: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """What became of one rollout."""

    verdict: str
    cause: str
    step: int
    at_s: int


GOOD = Version()
CASES = {
    "2 % errors against 0.1 %": Version(errors=0.02),
    "correct, at twice the price": Version(price=2.0),
    "half as slow again": Version(median_ms=45.0),
}


def latency_shares(version: Version) -> NDArray[np.float64]:
    """Probabilities of the latency buckets: lognormal, and one call of fifty three times as
    slow."""
    normal = statistics.NormalDist()
    edges = np.arange(-1, BUCKETS) * np.log(GROWTH)

    def below(median_ms: float) -> NDArray[np.float64]:
        scaled = (edges - np.log(median_ms)) / 0.3
        return np.array([normal.cdf(float(x)) for x in scaled])

    shares = np.diff(0.98 * below(version.median_ms) + 0.02 * below(3 * version.median_ms))
    return np.asarray(shares / shares.sum())


class Calls:
    """The calls of one revision, second by second, as sums since the rollout began. Owner: one
    simulated rollout."""

    def __init__(self, version: Version, rng: np.random.Generator) -> None:
        self._version = version
        self._rng = rng
        self._shares = latency_shares(version)
        self._ms = GROWTH ** np.arange(BUCKETS)
        self.answered: Counts = np.zeros(1, np.int64)
        self.failed: Counts = np.zeros(1, np.int64)
        self.latency: Counts = np.zeros((1, BUCKETS), np.int64)

    def draw(self, calls: Counts) -> None:
        """As many calls in each further second."""
        failed = self._rng.binomial(calls, self._version.errors)
        answered = calls - failed
        latency = self._rng.multinomial(answered, self._shares)
        self.answered = np.append(self.answered, self.answered[-1] + np.cumsum(answered))
        self.failed = np.append(self.failed, self.failed[-1] + np.cumsum(failed))
        self.latency = np.concatenate([self.latency, self.latency[-1] + np.cumsum(latency, axis=0)])

    def forget_after(self, second: int) -> None:
        """What was drawn for later seconds never happened: the weights changed."""
        self.answered, self.failed, self.latency = (
            self.answered[: second + 1],
            self.failed[: second + 1],
            self.latency[: second + 1],
        )

    def between(self, begin: int, end: int, *, with_latency: bool) -> Observation:
        """What was seen from one second to another."""
        seen = Observation(tenant="t", function_id="f", revision="r", minute=0)
        seen.answered, seen.failed = (
            int(counts[end] - counts[begin]) for counts in (self.answered, self.failed)
        )
        if with_latency:
            buckets = self.latency[end] - self.latency[begin]
            used = np.flatnonzero(buckets)
            counted = dict(zip(used.tolist(), buckets[used].tolist(), strict=True))
            seen.latency = {"warm": counted, "exec": counted}
            seen.calls_billed = seen.answered
            seen.cost_picos = int(buckets @ self._ms * PICOS_PER_MS * self._version.price)
        return seen


class Canary:
    """One simulated rollout. Owner: one call of `simulate`."""

    def __init__(self, plan: RolloutPlan, candidate: Version, rng: np.random.Generator) -> None:
        self._plan = plan
        self._rng = rng
        self._candidate, self._stable = Calls(candidate, rng), Calls(GOOD, rng)
        self._step, self._began, self._second = 0, 0, 0

    def run(self) -> End:
        """Judge each second until it ends."""
        while self._second < GIVE_UP_S:
            self._second += 1
            if self._second >= len(self._candidate.answered):
                self._draw()
            decision = self._decision()
            if decision.verdict is Verdict.ADVANCE:
                self._step, self._began = self._step + 1, self._second
                for calls in (self._candidate, self._stable):
                    calls.forget_after(self._second)
            elif decision.verdict is not Verdict.HOLD:
                return End(
                    verdict=decision.verdict.value,
                    cause=decision.cause,
                    step=self._step,
                    at_s=self._second,
                )
        return End(
            verdict=decision.verdict.value, cause=decision.cause, step=self._step, at_s=self._second
        )

    def _draw(self) -> None:
        calls = self._rng.poisson(CALLS_PER_S, CHUNK_S)
        ours = self._rng.binomial(calls, self._plan.steps[self._step] / 100)
        self._candidate.draw(ours)
        self._stable.draw(calls - ours)

    def _decision(self) -> Decision:
        standing = RolloutStatus(step=self._step, step_began_at=float(self._began), is_told=True)
        begin = 0 if self._plan.steps[self._step] == 100 else self._began
        return decide(
            self._plan,
            standing,
            self._evidence(self._candidate, self._began),
            self._evidence(self._stable, begin),
            now=float(self._second),
        )

    def _evidence(self, calls: Calls, begin: int) -> RevisionEvidence:
        recent = calls.between(max(0, self._second - RECENT_S), self._second, with_latency=False)
        hour = calls.between(max(0, self._second - 3600), self._second, with_latency=False)
        return RevisionEvidence(
            step=calls.between(begin, self._second, with_latency=True), recent=recent, hour=hour
        )


def simulate(seed: int, *, candidate: Version, plan: RolloutPlan = PLAN) -> End:
    """One rollout; the same seed is the same one."""
    return Canary(plan, candidate, np.random.default_rng(seed)).run()


def many(candidate: Version, *, runs: int, plan: RolloutPlan = PLAN) -> list[End]:
    """So many rollouts, on all cores."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(
            pool.map(
                partial(simulate, candidate=candidate, plan=plan),
                range(runs),
                chunksize=max(1, runs // 50),
            )
        )


def add(report: Report, *, runs: int) -> None:
    """Simulate `runs` good canaries and as many of each bad kind, and say what became of them."""
    with phase(f"{runs} good canaries"):
        good = many(GOOD, runs=runs)
    back = _rolled_back(good)
    done = [end for end in good if end.verdict == "done"]
    report.rows.append(
        Row.of(
            "good canary: until it is done",
            "s",
            [end.at_s for end in done],
            f"{len(done)} of {runs}; 4 steps of 300 s",
        )
    )
    report.ratios["good canaries rolled back"] = len(back) / runs
    report.ratios["stated false-rollback rate"] = PLAN.false_rollback_rate
    for name, version in CASES.items():
        with phase(f"{runs} canaries: {name}"):
            ends = many(version, runs=runs)
        caught = _rolled_back(ends)
        first = [end for end in caught if end.step == 0 and end.at_s <= PLAN.every_s]
        causes = ", ".join(
            f"{sum(end.cause == cause for end in caught)} by {cause}"
            for cause in sorted({end.cause for end in caught})
        )
        if caught:
            report.rows.append(
                Row.of(f"{name}: until it is caught", "s", [end.at_s for end in caught], causes)
            )
        report.ratios[f"{name}: caught"] = len(caught) / runs
        report.ratios[f"{name}: caught within its first step"] = len(first) / runs
    silent = replace(PLAN, availability=0.5)
    with phase(f"{runs} canaries: 2 % errors, alarm off"):
        ends = many(CASES["2 % errors against 0.1 %"], runs=runs, plan=silent)
    by_test = [end for end in _rolled_back(ends) if end.step == 0]
    if by_test:
        report.rows.append(
            Row.of(
                "2 % errors, by the comparison alone",
                "s",
                [end.at_s for end in by_test],
                f"{len(by_test)} of {runs}",
            )
        )


def _rolled_back(ends: Sequence[End]) -> list[End]:
    return [end for end in ends if end.verdict in ("rollback", "halt")]


def main() -> None:
    """Run it; print the table."""
    asked = options(__doc__.partition("\n")[0])
    report = Report(
        f"canaries, {CALLS_PER_S} calls/s, steps {', '.join(map(str, PLAN.steps))} % of "
        f"{PLAN.every_s:.0f} s"
    )
    add(report, runs=QUICK_RUNS if asked.quick else RUNS)
    report.finish(asked)
    stated, found = (
        report.ratios["stated false-rollback rate"],
        report.ratios["good canaries rolled back"],
    )
    sys.exit(
        0
        if found <= stated
        and report.ratios["2 % errors against 0.1 %: caught within its first step"] == 1
        else 1
    )


if __name__ == "__main__":
    main()
