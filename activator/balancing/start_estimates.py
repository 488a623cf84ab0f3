"""How long the next start takes, and how many starts a burst of waiting calls needs now, so that a
cold request does not wait for the autoscaler's next tick.

Each start kind has its own moving average, because they differ by three orders of magnitude. The
next kind follows from the state of the node: FORK while a Template is resident; otherwise RESTORE
where a snapshot is known to work, else IMPORT or COLD, whichever was the last.

A waiting call is *covered* when there is a free slot for it, when a starting instance will serve
it, or when the running instances will have served it before a new start could be ready. Only
uncovered calls need starts. A start that waits for room is judged again when it could have it
(`is_start_needed`): a function whose starts take long would otherwise occupy room for calls that
its running instances serve meanwhile."""

from __future__ import annotations

import math
from collections.abc import Collection

from snapshotter.types import StartKind

WEIGHT = 0.3
"""Weight of the newest start: half of the average are the last two, so that it follows a node that
became slower after two starts."""
_LADDER = tuple(StartKind)
_FORKED = frozenset({"fork", "assign"})
"""Phases of a start that was forked from a Template, however that Template was started."""


class StartTimeEstimator:
    """Durations of the starts of one revision."""

    def __init__(self) -> None:
        self._average_s: dict[StartKind, float] = {}
        self._has_template = False
        self._from_nothing = StartKind.COLD

    def __repr__(self) -> str:
        known = ", ".join(
            f"{kind} {seconds * 1000:.0f} ms" for kind, seconds in self._average_s.items()
        )
        return f"<StartTimeEstimator next {self.next_rung()}: {known or 'nothing known'}>"

    def observe(self, kind: StartKind, seconds: float, phases: Collection[str]) -> None:
        """Record that a start by `kind` took `seconds`; `phases` are the names of its phases."""
        before = self._average_s.get(kind)
        self._average_s[kind] = seconds if before is None else before + WEIGHT * (seconds - before)
        if kind in (StartKind.RESTORE, StartKind.IMPORT, StartKind.COLD):
            self._from_nothing = kind
        if kind is StartKind.FORK or not _FORKED.isdisjoint(phases):
            self._has_template = True

    def set_template(self, *, is_resident: bool) -> None:
        """Set whether a Template is resident."""
        self._has_template = is_resident

    def snapshot_proven(self, restore_s: float) -> None:
        """Record that a snapshot was proven and restored in `restore_s`: the estimate until a start
        is measured here."""
        self._average_s.setdefault(StartKind.RESTORE, restore_s)
        self._from_nothing = StartKind.RESTORE

    def next_rung(self) -> StartKind:
        """The kind of the next start."""
        return StartKind.FORK if self._has_template else self._from_nothing

    def expected_s(self) -> float | None:
        """Expected duration of the next start in seconds. Falls back to the next slower kind with
        measurements; None = unknown."""
        at_least = _LADDER[_LADDER.index(self.next_rung()) :]
        return next((self._average_s[kind] for kind in at_least if kind in self._average_s), None)


SHORTEST_CALL_S = 1e-9
"""No call is shorter than the clock's resolution; a shorter mean is rounding."""


def starts_for_burst(
    *,
    waiting: int,
    free_slots: int,
    starting_slots: int,
    max_inputs: int,
    instances: int,
    max_instances: int,
    running_slots: int = 0,
    start_s: float | None = None,
    call_s: float | None = None,
) -> int:
    """Number of starts to begin at once for `waiting` calls, at least 0.

    Args:
        waiting: calls without a slot.
        free_slots: free slots of running instances.
        starting_slots: slots of the starting instances.
        max_inputs: slots of one instance.
        instances, max_instances: running and starting instances, and the ceiling.
        running_slots: slots of all running instances, including busy ones.
        start_s: expected duration of the next start; None = unknown.
        call_s: mean execution time of a call; None = unknown."""
    uncovered = (
        waiting
        - free_slots
        - starting_slots
        - drained_before_start(slots=running_slots, start_s=start_s, call_s=call_s)
    )
    if uncovered <= 0:
        return 0
    return max(0, min(math.ceil(uncovered / max_inputs), max_instances - instances))


def is_start_needed(
    *,
    waiting: int,
    starting_slots: int,
    running_slots: int,
    oldest_wait_s: float,
    start_s: float | None,
    call_s: float | None,
    objective_s: float | None = None,
) -> bool:
    """Whether a start that waited for room is worth the room: more calls wait than the other starts
    have slots for and the running instances will have served before it could be ready.

    A call that has waited for the duration of a start, or longer than the latency objective, shows
    that the running instances are slower than their mean. Then they do not count.

    Args:
        waiting: calls without a slot.
        starting_slots: slots of the other starting instances.
        running_slots: slots of all running instances, including busy ones.
        oldest_wait_s: how long the first of the waiting calls has waited.
        start_s: expected duration of the start; None = unknown.
        call_s: mean execution time of a call; None = unknown.
        objective_s: the latency objective; None = none declared."""
    is_overdue = (start_s is not None and oldest_wait_s >= start_s) or (
        objective_s is not None and oldest_wait_s > objective_s
    )
    drained = (
        0
        if is_overdue
        else drained_before_start(slots=running_slots, start_s=start_s, call_s=call_s)
    )
    return waiting - drained > starting_slots


def drained_before_start(*, slots: int, start_s: float | None, call_s: float | None) -> int:
    """Number of calls that `slots` slots finish during one start; 0 when either time is unknown."""
    if start_s is None or not call_s:
        return 0
    return math.floor(slots * start_s / max(call_s, SHORTEST_CALL_S))
