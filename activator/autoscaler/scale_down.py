"""Selects instances to drain: the longest idle first, and never a busy instance before an idle
one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A running instance: its calls in flight, and how long it has been idle (0 while it has
    calls)."""

    id: str
    in_flight: int
    idle_s: float = 0.0


def choose_victims(candidates: Iterable[Candidate], count: int) -> tuple[str, ...]:
    """Ids of the `count` instances to drain, in order; fewer when there are not as many. Ties are
    resolved by id, so the choice is repeatable."""
    order = sorted(candidates, key=lambda c: (c.in_flight, -c.idle_s, c.id))
    return tuple(c.id for c in order[: max(0, count)])
