"""How long to keep an idle instance: the meaning of `scaledown_window="auto"`.

Per level (the first, second, … instance), a histogram records the length of the pauses in which
that many instances were not needed. Keeping an instance for `w` seconds after its last use costs w
where the pause is longer, otherwise the pause; stopping it costs a start where the pause is longer.
The window is the w with the least expected cost under the recorded pauses, with decaying weights.
So a function that is called each minute keeps its instance for a minute, one with a fast start for
a moment, and one with pauses of hours not at all. (A histogram per function: Shahrad et al.,
"Serverless in the Wild", ATC 2020; the bound on the loss without one is that of the ski rental
problem.)

Costs are in seconds of one instance. `waiting_cost` is how many idle seconds one second of a
caller's waiting is worth.

Before any pause was recorded, all orders of magnitude between a second and a day are equally
likely. The data belongs to one RevisionScaler; no lock is needed."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from dataclasses import dataclass, field

SHORTEST_S, LONGEST_S = 1.0, 86_400.0
BLINK_S = 2.0
"""Shorter gaps are not pauses: usage is sampled once a second."""
STEP = 1.25
"""Ratio of a bucket's bounds. A window is chosen to within a quarter, which is finer than pauses
repeat."""
BUCKETS = math.ceil(math.log(LONGEST_S / SHORTEST_S, STEP))
EDGES_S = tuple(SHORTEST_S * STEP**n for n in range(BUCKETS + 1))
MIDDLES_S = tuple(math.sqrt(low * high) for low, high in itertools.pairwise(EDGES_S))
PRIOR = 2.0
"""Weight of the prior distribution, in pauses."""
DECAY = 0.98
"""Factor of the weights of older pauses at each new one: the last fifty count for two thirds."""
LEVELS = 32
"""Instances beyond this share the histogram of the last level."""

FUNCTIONS = 10_000
"""Maximum number of functions kept; a level takes half a kilobyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAlivePolicy:
    """Parameters of `auto`.

    Attributes:
        waiting_cost: idle seconds of an instance that one second of a caller's waiting is worth;
            the greater, the longer it is kept.
        longest_s: upper limit of a window."""

    waiting_cost: float
    longest_s: float


@dataclass(eq=False, slots=True)
class InstanceLevel:
    """The n-th instance: recorded pauses by length, and when it was last needed."""

    needed_at: float
    weights: list[float] = field(default_factory=lambda: [PRIOR / BUCKETS] * BUCKETS)
    _terms: tuple[float, float] = (0.0, 0.0)
    _window_s: float = 0.0

    def record_pause(self, length_s: float) -> None:
        """Record a pause."""
        bucket = min(
            BUCKETS - 1, max(0, math.floor(math.log(max(length_s, SHORTEST_S) / SHORTEST_S, STEP)))
        )
        self.weights = [weight * DECAY for weight in self.weights]
        self.weights[bucket] += 1.0
        self._terms = (0.0, 0.0)

    def window_s(self, *, cost_s: float, longest_s: float) -> float:
        """The window of least cost, cached until the next pause or other parameters."""
        if self._terms != (cost_s, longest_s):
            self._terms, self._window_s = (
                (cost_s, longest_s),
                window_s(self.weights, cost_s=cost_s, longest_s=longest_s),
            )
        return self._window_s


class IdleHistogram:
    """The pauses of one function. Owner: a RevisionScaler, and Pauses between two of them."""

    __slots__ = ("_levels",)

    def __init__(self) -> None:
        self._levels: list[InstanceLevel] = []

    def __repr__(self) -> str:
        return f"<IdleHistogram of {len(self._levels)} levels>"

    def record(self, now_s: float, needed: int) -> None:
        """Record how many instances were needed at once in the second that ends now."""
        while len(self._levels) < min(needed, LEVELS):
            self._levels.append(InstanceLevel(now_s))
        for level in self._levels[:needed]:
            if now_s - level.needed_at > BLINK_S:
                level.record_pause(now_s - level.needed_at)
            level.needed_at = now_s

    def kept(
        self,
        now_s: float,
        *,
        instances: int,
        start_s: float,
        terms: KeepAlivePolicy,
        is_crowded: bool,
    ) -> int:
        """How many of `instances` are worth keeping.

        Args:
            start_s: expected duration of the next start.
            is_crowded: starts of others wait for room. Then a second of an instance that serves no
                call, idle or starting, costs the waiting of a caller of theirs as well: both weigh
                `1 + waiting_cost`, and stopping costs `(1 + waiting_cost) + waiting_cost` for each
                second of the start."""
        cost = terms.waiting_cost
        cost_s = start_s * (1 + cost / (1 + cost) if is_crowded else 1 + cost)
        for n in range(min(instances, len(self._levels)), 0, -1):
            level = self._levels[n - 1]
            if now_s - level.needed_at <= max(
                BLINK_S, level.window_s(cost_s=cost_s, longest_s=terms.longest_s)
            ):
                return instances if n == LEVELS else n
        return 0


class IdleHistograms:
    """The Gaps of the FUNCTIONS functions that were called last, including those at zero. Owner:
    the AutoscalerLoop."""

    def __init__(self) -> None:
        self._gaps: OrderedDict[str, IdleHistogram] = OrderedDict()

    def __repr__(self) -> str:
        return f"<IdleHistograms of {len(self._gaps)} functions>"

    def get_or_create(self, name: str) -> IdleHistogram:
        """The Gaps of a function. Its revisions share them, because they have the same callers."""
        gaps = self._gaps.setdefault(name, IdleHistogram())
        self._gaps.move_to_end(name)
        if len(self._gaps) > FUNCTIONS:
            self._gaps.popitem(last=False)
        return gaps


def window_s(weights: list[float], *, cost_s: float, longest_s: float = LONGEST_S) -> float:
    """The window of least expected cost: 0, or the end of a bucket. `cost_s`: cost of stopping an
    instance that is needed again."""
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
