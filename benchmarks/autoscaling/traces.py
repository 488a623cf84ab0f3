"""Made-up traffic: who calls which function when, for how long, and how long that function's starts
take.

The same seed gives the same traffic to every policy: arrivals, call times and start times are drawn
here, once. Start times span 0.1 to 90 s, because that is the range between a fork and a big model
from an object store; each function keeps to its own, with some scatter."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SHORTEST_START_S, LONGEST_START_S = 0.1, 90.0
START_SCATTER = 0.3
"""Sigma of a function's start times, lognormal: a tenth of them take half as long again."""
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One function and all its calls.

    Attributes:
        start_s: median of its start times.
        calls: (when it comes, how long it takes), by time, in seconds.
        seed: of its start times: a start takes the same time under every policy that begins it at
            the same moment, so that policies differ by what they decide and not by luck.
    """

    name: str
    tenant: str
    start_s: float
    calls: tuple[tuple[float, float], ...]
    max_inputs: int = 1
    max_instances: int = 8
    seed: int = 0

    def start_time(self, at_s: float, n: int) -> float:
        """Of the n-th start that begins at `at_s`."""
        dice = random.Random(f"{self.seed} {at_s:.3f} {n}")
        drawn = dice.lognormvariate(math.log(self.start_s), START_SCATTER)
        return min(LONGEST_START_S, max(SHORTEST_START_S, drawn))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Traffic of many functions; `gpus`: how many instances fit the cluster, None = any number."""

    name: str
    functions: tuple[Function, ...]
    gpus: int | None = None

    @property
    def calls(self) -> int:
        """Of all functions."""
        return sum(len(function.calls) for function in self.functions)


def poisson(
    dice: random.Random, rate: Callable[[float], float], peak: float, end_s: float
) -> Iterator[float]:
    """Arrivals at a rate that changes, at most `peak` per second (thinning: Lewis and Shedler,
    1979)."""
    now = 0.0
    while (now := now + dice.expovariate(peak)) < end_s:
        if dice.random() * peak < rate(now):
            yield now


def renewals(dice: random.Random, gap: Callable[[], float], end_s: float) -> Iterator[float]:
    """Arrivals after gaps that do not depend on each other; the first somewhere within one."""
    now = gap() * dice.random()
    while now < end_s:
        yield now
        now += gap()


def _function(
    dice: random.Random,
    name: str,
    tenant: str,
    arrivals: Iterator[float],
    *,
    call_s: float,
    max_inputs: int = 1,
) -> Function:
    start_s = math.exp(dice.uniform(math.log(SHORTEST_START_S), math.log(LONGEST_START_S)))
    calls = tuple((at, max(0.02, dice.lognormvariate(math.log(call_s), 0.6))) for at in arrivals)
    return Function(
        name=name,
        tenant=tenant,
        start_s=start_s,
        calls=calls,
        max_inputs=max_inputs,
        seed=dice.getrandbits(32),
    )


def steady(seed: int, hours: float) -> Trace:
    """Calls at random at a rate that stays."""
    dice = random.Random(seed)
    functions = []
    for n in range(8):
        call_s, busy = dice.uniform(0.3, 4.0), dice.uniform(0.3, 3.0)
        rate = busy / call_s
        arrivals = poisson(dice, lambda _, rate=rate: rate, rate, hours * HOUR_S)  # type: ignore[misc]
        functions.append(_function(dice, f"steady-{n}", f"tenant-{n % 4}", arrivals, call_s=call_s))
    return Trace(name="steady", functions=tuple(functions))


def bursty(seed: int, hours: float) -> Trace:
    """Minutes of silence between bursts that ask for several instances at once."""
    dice = random.Random(seed)
    functions = []
    for n in range(12):
        call_s = dice.uniform(0.3, 4.0)
        arrivals = _bursts(
            dice, dice.uniform(2, 6) / call_s, quiet_s=dice.uniform(60, 900), end_s=hours * HOUR_S
        )
        functions.append(
            _function(
                dice,
                f"bursty-{n}",
                f"tenant-{n % 4}",
                arrivals,
                call_s=call_s,
                max_inputs=dice.choice((1, 1, 4)),
            )
        )
    return Trace(name="bursty", functions=tuple(functions))


def _bursts(dice: random.Random, rate: float, *, quiet_s: float, end_s: float) -> Iterator[float]:
    begins = dice.expovariate(1 / quiet_s)
    while begins < end_s:
        ends = begins + dice.uniform(5, 60)
        now = begins
        while now < ends:
            yield now
            now += dice.expovariate(rate)
        begins = ends + dice.expovariate(1 / quiet_s)


def diurnal(seed: int, hours: float) -> Trace:
    """A day's rise and fall within the whole trace: from next to nothing in the night to several
    instances at noon."""
    dice = random.Random(seed)
    functions = []
    for n in range(8):
        call_s, shift = dice.uniform(0.3, 4.0), dice.uniform(-0.1, 0.1)
        peak, end_s = dice.uniform(0.5, 3.0) / call_s, hours * HOUR_S

        def rate(
            now: float, peak: float = peak, shift: float = shift, end_s: float = end_s
        ) -> float:
            height = (1 - math.cos(2 * math.pi * (now / end_s + shift))) / 2
            return peak * (0.002 + 0.998 * height**3)

        functions.append(
            _function(
                dice,
                f"diurnal-{n}",
                f"tenant-{n % 4}",
                poisson(dice, rate, peak, end_s),
                call_s=call_s,
            )
        )
    return Trace(name="diurnal", functions=tuple(functions))


def heavy_tailed(seed: int, hours: float, count: int = 40) -> Trace:
    """As public traces of serverless platforms describe it: few functions have most calls (Zipf),
    gaps spread over orders of magnitude (lognormal and Pareto), and a fifth of the functions is
    called by a timer (Shahrad et al., "Serverless in the Wild", ATC 2020)."""
    dice = random.Random(seed)
    functions = []
    for n in range(count):
        mean_gap_s = 6.0 * (n + 1) ** 1.1
        kind = dice.choices(("lognormal", "pareto", "timer"), (5, 3, 2))[0]
        arrivals = renewals(dice, _gaps(dice, kind, mean_gap_s), hours * HOUR_S)
        call_s = math.exp(dice.gauss(math.log(1.0), 0.8))
        functions.append(_function(dice, f"{kind}-{n}", f"tenant-{n % 8}", arrivals, call_s=call_s))
    return Trace(name="heavy-tailed", functions=tuple(functions))


def _gaps(dice: random.Random, kind: str, mean_s: float) -> Callable[[], float]:
    if kind == "timer":
        return lambda: mean_s * dice.uniform(0.98, 1.02)
    if kind == "lognormal":
        sigma = dice.uniform(1.2, 2.2)
        return lambda: dice.lognormvariate(math.log(mean_s) - sigma**2 / 2, sigma)
    alpha = dice.uniform(1.2, 1.8)
    return lambda: mean_s * (alpha - 1) / alpha * dice.paretovariate(alpha)


def spike(seed: int, hours: float) -> Trace:
    """Three times the traffic for every tenant at once, for two minutes each half hour, on a
    cluster with half as much again as needed."""
    dice = random.Random(seed)
    functions, busy_in_all = [], 0.0
    for n in range(16):
        call_s, busy = dice.uniform(0.3, 4.0), dice.uniform(0.1, 2.0)
        base = busy / call_s
        busy_in_all += max(1.0, busy)

        def rate(now: float, base: float = base) -> float:
            return base * (3.0 if 900 <= now % 1800 < 1020 else 1.0)

        arrivals = poisson(dice, rate, base * 3, hours * HOUR_S)
        functions.append(_function(dice, f"spiky-{n}", f"tenant-{n % 8}", arrivals, call_s=call_s))
    return Trace(name="spike", functions=tuple(functions), gpus=math.ceil(busy_in_all * 1.5))


TRACES: dict[str, Callable[[int, float], Trace]] = {
    "steady": steady,
    "bursty": bursty,
    "diurnal": diurnal,
    "heavy-tailed": heavy_tailed,
    "spike": spike,
}
