"""Waiting times of a queue with several servers, by formula.

Model: Poisson arrivals of rate λ, c servers, one queue in order of arrival, and independent service
times with mean S and squared coefficient of variation C². Pure.

- Exponential service times (M/M/c): A. K. Erlang, "Solution of some problems in the theory of
  probabilities of significance in automatic telephone exchanges", 1917; L. Kleinrock, "Queueing
  Systems", volume 1, 1975, section 3.5.
- Others (M/G/c): the mean wait of M/M/c times (Ca² + Cs²) / 2, here with Ca² = 1: the approximation
  of Allen and Cunneen (A. O. Allen, "Probability, Statistics, and Queueing Theory", 1978), for one
  server that of J. F. C. Kingman, "The single server queue in heavy traffic", 1961. It is exact for
  M/M/c, and for the mean of M/G/1 (Pollaczek and Khinchine).
- The tail of the wait: exponential, with that mean (W. Whitt, "Approximations for the GI/G/m
  queue", 1993). It is exact for M/M/c; heavy-tailed service times wait longer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_STEPS = 50
"""Halvings of the interval in which a quantile is: 1e-15 of it is left."""


def erlang_b(servers: int, load: float) -> float:
    """Return the share of calls that find all servers busy where none waits (M/M/c/c). `load`: the
    mean number of busy servers if none were refused, λS. By the recurrence in c, which does not
    overflow."""
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
    return blocked


def erlang_c(servers: int, load: float) -> float:
    """Return the share of calls that wait (M/M/c); 1 where `load` is at least `servers`."""
    if load >= servers:
        return 1.0
    blocked = erlang_b(servers, load)
    return blocked / (1 - load / servers * (1 - blocked))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The distribution of the wait: the share of calls that wait, and their mean wait."""

    share: float
    mean: float

    def tail(self, wait: float) -> float:
        """The share of calls that wait longer than `wait`."""
        if wait < 0:
            return 1.0
        return self.share * math.exp(-wait / self.mean) if self.share else 0.0


def wait_of(servers: int, load: float, *, mean: float, scv: float) -> Wait:
    """Return the distribution of the wait (M/G/c), in the unit of `mean`, the mean service time.
    `scv`: variance of service times ÷ mean². `load` must be below `servers`."""
    return Wait(share=erlang_c(servers, load), mean=mean / (servers - load) * (1 + scv) / 2)


def response_quantile(share: float, servers: int, load: float, times: Sequence[float]) -> float:
    """Return the quantile of wait and service together, for measured service times; infinite where
    `load` is at least `servers`. The wait is independent of the service time, so the tail is the
    mean of the tails of the wait behind each measured time."""
    if load >= servers:
        return math.inf
    mean = sum(times) / len(times)
    scv = sum((time - mean) ** 2 for time in times) / len(times) / mean**2
    wait = wait_of(servers, load, mean=mean, scv=scv)
    low, high = 0.0, max(times)

    def tail(response: float) -> float:
        return sum(wait.tail(response - time) for time in times) / len(times)

    while tail(high) > 1 - share:
        high *= 2
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle) > 1 - share else (low, middle)
    return high
