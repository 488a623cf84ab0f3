"""Aggregates the reports of all activators on a revision.

A member that is silent for a moment keeps its claims and demand, but its load is unknown: then
nothing shrinks. A member that is silent for as long as a membership lasts is gone, and its report
is dropped. A missing report (Redis lost its data) counts as a silent member."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from activator.coordination.state import TTL_S
from activator.knative.autoscaler.load_report import Load, StoredReport

SILENT_S = 5.0
"""Reports are sent each second."""
GONE_S = TTL_S


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionLoad:
    """The aggregated load of one revision.

    Attributes:
        concurrency: concurrent calls over all activators; None = reports are missing.
        held: calls in flight in each claimed pod, by its uid.
        asked: pods requested in addition."""

    concurrency: float | None = None
    in_flight: int = 0
    waiting: int = 0
    asked: int = 0
    held: Mapping[str, int] = field(default_factory=dict)
    oldest_wait_s: float = 0.0
    start_s: float | None = None
    call_s: float | None = None

    @property
    def floor(self) -> int:
        """Number of pods that activators have claimed or wait for."""
        return len(self.held) + self.asked


class Members:
    """The members and their latest reports. Owner: the leader, by its monotonic clock."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, StoredReport]] = {}

    def __repr__(self) -> str:
        return f"<Members {', '.join(sorted(self._last)) or 'empty'}>"

    def record(self, found: Mapping[str, StoredReport], now: float) -> None:
        """Record the reports in the store."""
        for member, posted in found.items():
            reported_at = now - posted.age_s
            if posted.age_s < GONE_S:
                self._last[member] = (reported_at, posted)

    def drop_gone(self, now: float) -> None:
        """Drop members that were silent for too long."""
        self._last = {
            member: (reported_at, posted)
            for member, (reported_at, posted) in self._last.items()
            if now - reported_at < GONE_S
        }

    @property
    def is_empty(self) -> bool:
        """Whether no member has reported within the duration of a membership."""
        return not self._last

    def is_whole(self, now: float) -> bool:
        """Whether there are members and all have reported recently."""
        return bool(self._last) and all(
            now - reported_at <= SILENT_S for reported_at, _ in self._last.values()
        )

    def merged(self, key: str, now: float) -> RevisionLoad:
        """The aggregated load of one revision."""
        loads = [
            load
            for _, posted in self._last.values()
            if (load := posted.statement.get(key)) is not None
        ]
        held: dict[str, int] = {}
        for load in loads:
            for uid, calls in load.held.items():
                held[uid] = max(calls, held.get(uid, 0))
        return RevisionLoad(
            concurrency=sum(load.concurrency for load in loads) if self.is_whole(now) else None,
            in_flight=sum(load.in_flight for load in loads),
            waiting=sum(load.waiting for load in loads),
            asked=sum(load.asked for load in loads),
            held=held,
            oldest_wait_s=max((load.oldest_wait_s for load in loads), default=0.0),
            start_s=_longest(loads, "start_s"),
            call_s=_longest(loads, "call_s"),
        )


def _longest(loads: list[Load], name: str) -> float | None:
    return max(
        (value for load in loads if (value := getattr(load, name)) is not None), default=None
    )
