"""Arrival processes: the times at which requests are due, independent of responses. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator

from pilotlight.errors import InvalidInput

KINDS = ("poisson", "even", "bursty")
_BURST_SHAPE = 0.25
"""Shape of the gamma distribution of bursty gaps; their coefficient of variation is 2."""


def arrivals(
    kind: str, *, rate_per_s: float, duration_s: float, source: random.Random
) -> Iterator[float]:
    """Yield increasing times at which requests are due, in seconds from the start, below
    `duration_s`. Raises InvalidInput.

    `poisson`: many independent callers; `even`: constant gaps; `bursty`: gamma-distributed gaps,
    which form bursts and pauses."""
    if kind not in KINDS:
        raise InvalidInput(f"--arrivals {kind!r}: must be one of {', '.join(KINDS)}")
    mean_s, at = 1 / rate_per_s, 0.0
    while True:
        match kind:
            case "poisson":
                at += source.expovariate(rate_per_s)
            case "bursty":
                at += source.gammavariate(_BURST_SHAPE, mean_s / _BURST_SHAPE)
            case _:
                at += mean_s
        if at >= duration_s:
            return
        yield at
