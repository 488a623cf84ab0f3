"""Random lengths by a distribution's name and numbers, as users type it: `lognormal:200,0.8`. Pure;
the generator is the caller's.

Lengths of prompts and of answers have heavy tails, and their tails decide the waiting of everybody
else, so those are offered."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from pilotlight.errors import InvalidInput

_FORMS = {
    "fixed": ("N", 1),
    "uniform": ("LOW,HIGH", 2),
    "exponential": ("MEAN", 1),
    "lognormal": ("MEDIAN,SIGMA", 2),
    "pareto": ("MINIMUM,ALPHA", 2),
}
MAX_LENGTH = 10_000_000


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """One distribution of whole numbers from 1 on. `text`: as it was written; `longest`: what is
    above is cut to it."""

    text: str
    longest: int
    _draw: Callable[[random.Random], float]

    def draw(self, source: random.Random) -> int:
        """One length."""
        try:
            return max(1, round(min(float(self.longest), self._draw(source))))
        except OverflowError:  # a tail beyond all numbers
            return self.longest


def parse_distribution(text: str, *, option: str, longest: int = MAX_LENGTH) -> LengthDistribution:
    """`200`, `fixed:200`, `uniform:10,400`, `exponential:200`, `lognormal:200,0.8`,
    `pareto:50,1.5`. Raises InvalidInput."""
    name, colon, rest = text.partition(":")
    if not colon:
        name, rest = "fixed", text
    form = _FORMS.get(name)
    if form is None:
        raise InvalidInput(
            f"{option} {text!r}: there is no distribution {name!r}",
            hint=f"There are {', '.join(_FORMS)}.",
        )
    try:
        numbers = [float(number) for number in rest.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != form[1] or not all(
        math.isfinite(n) and 0 < n <= MAX_LENGTH for n in numbers
    ):
        raise InvalidInput(
            f"{option} {text!r}: write {name}:{form[0]}, numbers above 0",
            hint="For example lognormal:200,0.8.",
        )
    return LengthDistribution(text, longest, _drawer(name, numbers, option))


def _drawer(name: str, numbers: list[float], option: str) -> Callable[[random.Random], float]:
    first, second = numbers[0], numbers[-1]
    match name:
        case "uniform":
            if first > second:
                raise InvalidInput(
                    f"{option}: uniform:{first:g},{second:g} is empty: the lower bound comes first"
                )
            return lambda source: source.uniform(first, second)
        case "exponential":
            return lambda source: source.expovariate(1 / first)
        case "lognormal":
            return lambda source: first * math.exp(source.gauss(0.0, second))
        case "pareto":
            return lambda source: first * source.paretovariate(second)
    return lambda _: first
