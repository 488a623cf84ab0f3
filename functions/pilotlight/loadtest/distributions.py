"""Random lengths from distributions in the syntax `lognormal:200,0.8`. Pure: the caller passes the
random generator.

Lengths of prompts and outputs have heavy tails, which determine the queueing of other requests, so
heavy-tailed distributions are included."""

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
_MEAN_OF = 4_000


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """A distribution of integers from 1 to `longest`; greater values are clipped. `text`: its
    source text."""

    text: str
    longest: int
    _draw: Callable[[random.Random], float]

    def draw(self, source: random.Random) -> int:
        """Draw one length."""
        try:
            return max(1, round(min(float(self.longest), self._draw(source))))
        except OverflowError:  # the value exceeds the float range
            return self.longest

    def mean(self) -> float:
        """The mean of drawn lengths, to some percent: clipped ones have no formula."""
        source = random.Random(0)
        return sum(self.draw(source) for _ in range(_MEAN_OF)) / _MEAN_OF


def parse_distribution(text: str, *, option: str, longest: int = MAX_LENGTH) -> LengthDistribution:
    """Parse `200`, `fixed:200`, `uniform:10,400`, `exponential:200`, `lognormal:200,0.8` or
    `pareto:50,1.5`. Raises InvalidInput."""
    name, colon, rest = text.partition(":")
    if not colon:
        name, rest = "fixed", text
    form = _FORMS.get(name)
    if form is None:
        raise InvalidInput(
            f"{option} {text!r}: there is no distribution {name!r}",
            hint=f"Use one of {', '.join(_FORMS)}.",
        )
    try:
        numbers = [float(number) for number in rest.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != form[1] or not all(
        math.isfinite(n) and 0 < n <= MAX_LENGTH for n in numbers
    ):
        raise InvalidInput(
            f"{option} {text!r}: must be {name}:{form[0]} with numbers above 0",
            hint="For example lognormal:200,0.8.",
        )
    return LengthDistribution(text, longest, _drawer(name, numbers, option))


def _drawer(name: str, numbers: list[float], option: str) -> Callable[[random.Random], float]:
    first, second = numbers[0], numbers[-1]
    match name:
        case "uniform":
            if first > second:
                raise InvalidInput(
                    f"{option}: uniform:{first:g},{second:g} is empty: write the lower bound first"
                )
            return lambda source: source.uniform(first, second)
        case "exponential":
            return lambda source: source.expovariate(1 / first)
        case "lognormal":
            return lambda source: first * math.exp(source.gauss(0.0, second))
        case "pareto":
            return lambda source: first * source.paretovariate(second)
    return lambda _: first
