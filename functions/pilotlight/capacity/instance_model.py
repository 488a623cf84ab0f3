"""Model of one instance, estimated from its measured calls: the work of each call, and how much
slower calls get the more of them run at once. Pure.

With n calls at once, a call takes 1 + s (n - 1) times as long as alone: s = 0 where calls do not
disturb each other, s = 1 where they share one processor. So n calls at once do n / (1 + s (n - 1))
times the work of one: Amdahl's law, with s the contention of the Universal Scalability Law
(N. J. Gunther, "Guerrilla Capacity Planning", 2007, section 4.4). The work of a call is its time
without that factor. An instance is never assumed to do more work at once than it was measured to:
beyond the calls at once that were measured, further ones only divide its speed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from pilotlight.capacity.measurements import MeasuredCall
from pilotlight.capacity.simulation import Work
from pilotlight.loadtest.distributions import LengthDistribution

MAX_SLOWDOWN = 1.0
"""Largest slowdown. With it the work of calls adds up to the time that their instance was busy.
More would say that calls at once do less work than one after the other; what looks so is mostly a
pause of the machine, in which calls pile up."""
_REACH = 0.99
"""Share of calls that ran with at most so many at once as count as measured."""
_STEPS = 40
_LEAST_MS = 0.001
_DRAWN = 4_000
"""Calls that are drawn for given lengths of prompts and answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceModel:
    """An instance.

    Attributes:
        slowdown: s, the share by which each further call at once makes a call slower.
        measured: calls at once up to which it was measured.
        slots: calls that it runs at once.
        works: work of its calls, to draw from.
    """

    slowdown: float
    measured: int
    slots: int
    works: Sequence[Work]

    @property
    def speeds(self) -> tuple[float, ...]:
        """Speed of each of 1, 2, … `slots` calls at once, as shares of that of a call alone."""
        return tuple(self.throughput(calls) / calls for calls in range(1, self.slots + 1))

    def throughput(self, calls: int) -> float:
        """Work that `calls` at once do together, as a multiple of that of a call alone."""
        known = min(calls, self.measured)
        return known / (1 + self.slowdown * (known - 1))

    @property
    def mean_ms(self) -> float:
        """Mean work of a call."""
        return sum(work.whole_ms for work in self.works) / len(self.works)

    @property
    def scv(self) -> float:
        """Squared coefficient of variation of the work of calls: 0 if all are equal, 1 if they are
        distributed exponentially."""
        mean = self.mean_ms
        return sum((w.whole_ms - mean) ** 2 for w in self.works) / len(self.works) / mean**2

    @property
    def max_rate_per_s(self) -> float:
        """Calls per second beyond which its queue grows without end."""
        return 1000 * self.throughput(self.slots) / self.mean_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTimes:
    """How the work of a language model's call grows with its tokens, in ms: of the first token
    `prompt_ms` + `prompt_token_ms` for each of the prompt that was not cached, and `token_ms` for
    each further one. `max_in`, `max_out`: the largest measured lengths."""

    prompt_ms: float
    prompt_token_ms: float
    token_ms: float
    max_in: int
    max_out: int


def estimate(calls: Sequence[MeasuredCall], *, slots: int) -> InstanceModel:
    """Estimate the model from at least one call."""
    slowdown = _slowdown(calls)
    at_once = sorted(call.calls_at_once for call in calls)
    reach = math.ceil(at_once[math.ceil(_REACH * len(at_once)) - 1] - 0.5)
    return InstanceModel(
        slowdown=slowdown,
        measured=max(1, min(slots, reach)),
        slots=slots,
        works=[_work(call, slowdown) for call in calls],
    )


def _slowdown(calls: Sequence[MeasuredCall]) -> float:
    """Return the slowdown for which the work of calls does not depend on the number of calls that
    each found at its begin: what arrives then is no other work. (With the calls at once while it
    ran it would: short calls are more often in a crowd for all of their time.) 0 if none found
    others. By logarithms, so that single long calls do not decide it."""
    mean = sum(call.found for call in calls) / len(calls)
    logs = [math.log(max(call.exec_ms, _LEAST_MS)) for call in calls]

    def dependence(slowdown: float) -> float:
        return sum(
            (call.found - mean) * (log - math.log(_factor(call, slowdown)))
            for call, log in zip(calls, logs, strict=True)
        )

    low, high = 0.0, MAX_SLOWDOWN
    if dependence(low) <= 0:
        return low
    if dependence(high) >= 0:
        return high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if dependence(middle) > 0 else (low, middle)
    return low


def _factor(call: MeasuredCall, slowdown: float) -> float:
    return 1 + slowdown * (call.calls_at_once - 1)


def _work(call: MeasuredCall, slowdown: float) -> Work:
    factor = _factor(call, slowdown)
    whole = call.exec_ms / factor
    return Work(first_ms=whole if call.first_ms is None else call.first_ms / factor, whole_ms=whole)


def token_times(calls: Sequence[MeasuredCall], works: Sequence[Work]) -> TokenTimes | None:
    """Fit the times of tokens to the work of streamed calls (least squares); None without any."""
    rows = [
        (call, work)
        for call, work in zip(calls, works, strict=True)
        if call.first_ms is not None and call.tokens_out
    ]
    if not rows:
        return None
    lengths = [float(call.tokens_in) for call, _ in rows]
    firsts = [work.first_ms for _, work in rows]
    slope = max(0.0, _slope(lengths, firsts))
    base = sum(firsts) / len(rows) - slope * sum(lengths) / len(rows)
    if base < 0:  # a line through the origin fits better than one that predicts negative times
        slope, base = sum(firsts) / max(1.0, sum(lengths)), 0.0
    further = sum(call.tokens_out - 1 for call, _ in rows)
    rests = sum(work.whole_ms - work.first_ms for _, work in rows)
    return TokenTimes(
        prompt_ms=base,
        prompt_token_ms=slope,
        token_ms=rests / further if further else 0.0,
        max_in=int(max(lengths)),
        max_out=max(call.tokens_out for call, _ in rows),
    )


def _slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / (spread or 1.0)


def works_of_lengths(
    calls: Sequence[MeasuredCall],
    works: Sequence[Work],
    times: TokenTimes,
    *,
    tokens_in: LengthDistribution | None,
    tokens_out: LengthDistribution | None,
    seed: int = 0,
) -> list[Work]:
    """Draw the work of calls of other lengths; None: as measured. Each has the deviation from the
    fit of a random measured call, so that the spread that tokens do not explain remains."""
    source = random.Random(seed)
    rows = [
        (call, work)
        for call, work in zip(calls, works, strict=True)
        if call.first_ms is not None and call.tokens_out
    ]
    drawn = []
    for _ in range(_DRAWN):
        call, work = source.choice(rows)
        first, rest = _expected(times, call.tokens_in, call.tokens_out)
        length_in = call.tokens_in if tokens_in is None else tokens_in.draw(source)
        length_out = call.tokens_out if tokens_out is None else tokens_out.draw(source)
        new_first, new_rest = _expected(times, length_in, length_out)
        first_ms = new_first * (work.first_ms / first if first else 1.0)
        rest_ms = new_rest * ((work.whole_ms - work.first_ms) / rest if rest else 1.0)
        drawn.append(Work(first_ms=first_ms, whole_ms=first_ms + rest_ms))
    return drawn


def _expected(times: TokenTimes, tokens_in: int, tokens_out: int) -> tuple[float, float]:
    first = times.prompt_ms + times.prompt_token_ms * tokens_in
    return first, times.token_ms * max(0, tokens_out - 1)
