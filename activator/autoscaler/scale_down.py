"""Who goes when there are too many: the idlest first, and never a busy instance before an idle
one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A running instance: its calls in flight, and for how long it has been without any (0 while it
    has some)."""

    id: str
    in_flight: int
    idle_s: float = 0.0


def choose_victims(candidates: Iterable[Candidate], count: int) -> tuple[str, ...]:
    """Ids of the `count` instances to drain, in order; fewer when there are not as many. Ties go by
    id, so a choice repeats."""
    order = sorted(candidates, key=lambda c: (c.in_flight, -c.idle_s, c.id))
    return tuple(c.id for c in order[: max(0, count)])
