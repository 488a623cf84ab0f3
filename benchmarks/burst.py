"""A burst on a cold function: 100 requests at once, one at a time per instance (`max_inputs=1`), at
most 8 instances.

All must succeed, and none may wait longer than needed. What is needed follows from the instances
that came up: each serves from the moment of its first call on, and a scheduler that knew no better
than "the longest waiting goes to the next free instance" would have begun the i-th call at the i-th
smallest of these times. The printed schedule shows where it differs."""

from __future__ import annotations

import heapq
import json
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks import stack
from benchmarks.harness import ROOT, Report, Row, options, phase

APP, FUNCTION = "bench-sleepy", "sleepy"
REQUESTS, INSTANCES, SECONDS = 100, 8, 0.1
SOURCE = ROOT / "benchmarks" / "functions" / "sleepy.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One call of the burst; times in seconds since the burst was sent."""

    sent_s: float
    began_s: float
    ended_s: float
    answered_s: float
    where: str
    start: str


def main() -> None:
    """Run it."""
    given = options(__doc__ or "")
    report = Report(
        f"burst: {REQUESTS} requests of {SECONDS * 1000:.0f} ms at once on a cold function, at "
        f"most {INSTANCES} instances"
    )
    rounds = 2 if given.quick else 5
    with stack.running() as platform:
        with phase("deploy"):
            platform.deploy(SOURCE)
        schedules = []
        for i in range(rounds):
            platform.wait_zero(APP)
            with phase(f"burst {i + 1}/{rounds}"):
                schedules.append(burst(platform))
    print_schedule(schedules[-1])
    late_ms = [1000 * late for slots in schedules for late in lateness_s(slots)]
    report.rows.append(
        Row.of(
            "first answer", "ms", [1000 * min(s.answered_s for s in slots) for slots in schedules]
        )
    )
    report.rows.append(
        Row.of(
            "last answer", "ms", [1000 * max(s.answered_s for s in slots) for slots in schedules]
        )
    )
    report.rows.append(Row.of("begun later than needed", "ms", late_ms))
    report.rows.append(
        Row.of("instances", "", [len({s.where for s in slots}) for slots in schedules])
    )
    makespan = [max(s.ended_s for s in slots) for slots in schedules]
    least = [REQUESTS * SECONDS / len({s.where for s in slots}) for slots in schedules]
    report.ratio(
        "makespan_over_ideal",
        Row.of("", "", [m / ideal for m, ideal in zip(makespan, least, strict=True)]).p50,
    )
    report.remarks.append("ideal: every instance there from the start; the rest is starting them")
    report.finish(given)


def burst(platform: stack.Stack) -> list[Slot]:
    """Send all at once, from as many threads. Raises StackFailed when one does not succeed."""
    origin = time.time()

    def one(_: int) -> Slot:
        sent = time.time()
        answer = platform.invoke(APP, FUNCTION, {"seconds": SECONDS})
        said = json.loads(answer.body)
        return Slot(
            sent_s=sent - origin,
            began_s=said["began"] - origin,
            ended_s=said["ended"] - origin,
            answered_s=time.time() - origin,
            where=said["where"],
            start=answer.start,
        )

    with ThreadPoolExecutor(REQUESTS) as pool:
        return sorted(pool.map(one, range(REQUESTS)), key=lambda slot: slot.began_s)


def lateness_s(slots: Sequence[Slot]) -> list[float]:
    """How much later than needed each call began, in order of beginning; 0 when it began as early
    as the instances allowed.

    Each instance is taken as available from its first call on, and a call as long as it was.
    """
    firsts: dict[str, float] = {}
    for slot in slots:
        firsts.setdefault(slot.where, slot.began_s)
    free = sorted(firsts.values())
    heapq.heapify(free)
    late = []
    for slot in slots:
        earliest = heapq.heappop(free)
        late.append(max(0.0, slot.began_s - earliest))
        heapq.heappush(free, earliest + slot.ended_s - slot.began_s)
    return late


def print_schedule(slots: Sequence[Slot], *, columns: int = 100) -> None:
    """One line per instance: a digit where a call ran (the last digit of its place in the order), a
    dot where it was idle."""
    end_s = max(slot.ended_s for slot in slots)
    places = sorted(
        {slot.where for slot in slots},
        key=lambda where: min(s.began_s for s in slots if s.where == where),
    )
    kinds = Counter(slot.start for slot in slots)
    print(
        f"schedule: 0 to {end_s * 1000:.0f} ms; calls came by "
        f"{', '.join(f'{kind} {n}' for kind, n in kinds.most_common())}"
    )
    for number, where in enumerate(places):
        line = ["."] * columns
        for i, slot in enumerate(slots):
            if slot.where == where:
                first = int(slot.began_s / end_s * (columns - 1))
                last = max(first + 1, int(slot.ended_s / end_s * (columns - 1)))
                line[first:last] = [str(i % 10)] * (last - first)
        print(f"  instance {number}  {''.join(line[:columns])}")


if __name__ == "__main__":
    main()
