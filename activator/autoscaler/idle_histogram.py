"""How long an idle instance is worth keeping: what `scaledown_window="auto"` means in numbers.

Remembered is, per level (the first, second, … instance), how long the pauses were in which that
many were not needed. Keeping an instance for `w` seconds after it was last needed costs w where the
pause is longer, else the pause; letting it go costs a start where the pause is longer. The window
is the w with the least expected cost under the pauses seen, older ones counting less; so a function
that is called each minute keeps its instance for a minute, one with a fast start for a moment, and
one with pauses of hours not at all. (The idea of a histogram per function: Shahrad et al.,
"Serverless in the Wild", ATC 2020; a bound on the loss without one is the ski rental's.)

Costs are in seconds of one instance. A caller's waiting is weighed by `waiting_cost`: how many idle
seconds one second of it is worth.

Before pauses were seen any length between a second and a day is as likely as any other of its order
of magnitude. The memory belongs to one Scaled; no lock is needed."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from dataclasses import dataclass, field

SHORTEST_S, LONGEST_S = 1.0, 86_400.0
BLINK_S = 2.0
"""Less is no pause: what is needed is looked at once a second."""
STEP = 1.25
"""Between a bucket's bounds: a window is chosen to within a quarter, which is finer than pauses
repeat."""
BUCKETS = math.ceil(math.log(LONGEST_S / SHORTEST_S, STEP))
EDGES_S = tuple(SHORTEST_S * STEP**n for n in range(BUCKETS + 1))
MIDDLES_S = tuple(math.sqrt(low * high) for low, high in itertools.pairwise(EDGES_S))
PRIOR = 2.0
"""What is believed before anything was seen weighs as much as this many pauses."""
DECAY = 0.98
"""Of a level's older pauses at each new one: the last fifty count for two thirds."""
LEVELS = 32
"""Instances beyond this share a level's memory."""

FUNCTIONS = 10_000
"""Remembered at most: a level takes half a kilobyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepTerms:
    """What `auto` weighs.

    Attributes:
        waiting_cost: idle seconds of an instance that one second of a caller's waiting is worth;
        the greater, the longer it is kept. longest_s: no window is longer.
    """

    waiting_cost: float
    longest_s: float


@dataclass(eq=False, slots=True)
class Level:
    """Of the n-th instance: the pauses seen, by length, and when it was last needed."""

    needed_at: float
    weights: list[float] = field(default_factory=lambda: [PRIOR / BUCKETS] * BUCKETS)
    _terms: tuple[float, float] = (0.0, 0.0)
    _window_s: float = 0.0

    def pause(self, length_s: float) -> None:
        """One pause ended."""
        bucket = min(
            BUCKETS - 1, max(0, math.floor(math.log(max(length_s, SHORTEST_S) / SHORTEST_S, STEP)))
        )
        self.weights = [weight * DECAY for weight in self.weights]
        self.weights[bucket] += 1.0
        self._terms = (0.0, 0.0)

    def window_s(self, *, cost_s: float, longest_s: float) -> float:
        """See `window_s`; computed anew only after a pause, or at another cost."""
        if self._terms != (cost_s, longest_s):
            self._terms, self._window_s = (
                (cost_s, longest_s),
                window_s(self.weights, cost_s=cost_s, longest_s=longest_s),
            )
        return self._window_s


class Gaps:
    """The pauses of one function. Owner: a Scaled, and who keeps it between two of them."""

    __slots__ = ("_levels",)

    def __init__(self) -> None:
        self._levels: list[Level] = []

    def __repr__(self) -> str:
        return f"<Gaps of {len(self._levels)} levels>"

    def record(self, now_s: float, needed: int) -> None:
        """So many instances were needed at once in the second that ends now."""
        while len(self._levels) < min(needed, LEVELS):
            self._levels.append(Level(now_s))
        for level in self._levels[:needed]:
            if now_s - level.needed_at > BLINK_S:
                level.pause(now_s - level.needed_at)
            level.needed_at = now_s

    def kept(
        self, now_s: float, *, instances: int, start_s: float, terms: KeepTerms, is_crowded: bool
    ) -> int:
        """How many of `instances` are worth keeping.

        Args:
            start_s: what the next start will take. is_crowded: others' starts wait for room: then
            an idle second costs a caller's waiting, too, and both sides weigh the same.
        """
        cost_s = start_s if is_crowded else start_s * (1 + terms.waiting_cost)
        for n in range(min(instances, len(self._levels)), 0, -1):
            level = self._levels[n - 1]
            if now_s - level.needed_at <= max(
                BLINK_S, level.window_s(cost_s=cost_s, longest_s=terms.longest_s)
            ):
                return instances if n == LEVELS else n
        return 0


class Pauses:
    """The Gaps of functions, those at zero included: of the FUNCTIONS that were called last. Owner:
    the Scaler."""

    def __init__(self) -> None:
        self._gaps: OrderedDict[str, Gaps] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Pauses of {len(self._gaps)} functions>"

    def of(self, name: str) -> Gaps:
        """A function's; its revisions share them, because its callers do not change with them."""
        gaps = self._gaps.setdefault(name, Gaps())
        self._gaps.move_to_end(name)
        if len(self._gaps) > FUNCTIONS:
            self._gaps.popitem(last=False)
        return gaps


def window_s(weights: list[float], *, cost_s: float, longest_s: float = LONGEST_S) -> float:
    """The window of least expected cost: 0, or the end of a bucket. `cost_s`: of letting go what is
    needed again."""
    beyond = sum(weights)
    waited_s, best_s, least_s = 0.0, 0.0, cost_s * beyond
    for weight, middle_s, end_s in zip(weights, MIDDLES_S, EDGES_S[1:], strict=True):
        if end_s > longest_s:
            break
        beyond -= weight
        waited_s += weight * middle_s
        expected_s = waited_s + beyond * (end_s + cost_s)
        if expected_s < least_s:
            best_s, least_s = end_s, expected_s
    return best_s
