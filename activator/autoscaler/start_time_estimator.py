"""How long the next start will take: which rung of the ladder it will be, and what starts by that
rung took so far.

Each rung has its own moving average, because they lie three orders of magnitude apart: a mean over
all of them says nothing about any. Which rung comes next follows from what is known of the node:
FORK while a Template is resident; without one RESTORE where a snapshot is known to work, else COLD.
Pure but for its own memory. Owner: a Throttler."""

from __future__ import annotations

from collections.abc import Collection

from snapshotter.types import StartKind

WEIGHT = 0.3
"""Of the newest start: half of the average is the last two, so that a node that became slower is
believed after two starts."""
_LADDER = tuple(StartKind)
_FORKED = frozenset({"fork", "assign"})
"""Phases of a start that was forked from a Template, whatever rung brought that Template up."""


class StartTimeEstimator:
    """What starts of one revision took."""

    def __init__(self) -> None:
        self._average_s: dict[StartKind, float] = {}
        self._has_template = False
        self._from_nothing = StartKind.COLD

    def __repr__(self) -> str:
        known = ", ".join(
            f"{kind} {seconds * 1000:.0f} ms" for kind, seconds in self._average_s.items()
        )
        return f"<StartTimeEstimator next {self.next_rung()}: {known or 'nothing known'}>"

    def took(self, kind: StartKind, seconds: float, phases: Collection[str]) -> None:
        """A start by `kind` took `seconds`; `phases` are the names of its phases."""
        before = self._average_s.get(kind)
        self._average_s[kind] = seconds if before is None else before + WEIGHT * (seconds - before)
        if kind in (StartKind.RESTORE, StartKind.COLD):
            self._from_nothing = kind
        if kind is StartKind.FORK or not _FORKED.isdisjoint(phases):
            self._has_template = True

    def template(self, *, is_resident: bool) -> None:
        """A Template came or went."""
        self._has_template = is_resident

    def snapshot_proven(self, restore_s: float) -> None:
        """A snapshot answered after `restore_s` when it was proven: what is expected of it until it
        is measured here."""
        self._average_s.setdefault(StartKind.RESTORE, restore_s)
        self._from_nothing = StartKind.RESTORE

    def next_rung(self) -> StartKind:
        """The rung that the next start will take."""
        return StartKind.FORK if self._has_template else self._from_nothing

    def expected_s(self) -> float | None:
        """Seconds that it will take; by the next slower rung that was seen where it was not; None =
        unknown."""
        at_least = _LADDER[_LADDER.index(self.next_rung()) :]
        return next((self._average_s[kind] for kind in at_least if kind in self._average_s), None)
