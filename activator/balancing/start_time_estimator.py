"""Estimates the duration of the next start: which start kind it will use, and the average of
earlier starts of that kind.

Each kind has its own moving average, because they differ by three orders of magnitude. The next
kind follows from the state of the node: FORK while a Template is resident; otherwise RESTORE where
a snapshot is known to work, else COLD. Pure except for its own state. Owner: a Throttler."""

from __future__ import annotations

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
        if kind in (StartKind.RESTORE, StartKind.COLD):
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
