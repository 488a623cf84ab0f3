"""Aggregates the reports of all activators on a revision.

A member that is silent for a moment keeps its claims and demand, but its load is unknown: then
nothing shrinks. A member that is silent for as long as a membership lasts is gone, and its report
is dropped. A missing report (Redis lost its data) counts as a silent member, and so does an
activator that lives and reports nothing: it starts, or is of before a change of the autoscaler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
        held: calls in flight in each claimed pod of the revision's own, by its uid.
        promoted: the same, in each instance in a promoted pod, by its id.
        promised: starts that wait for such an instance.
        asked: pods of the revision's own requested in addition."""

    concurrency: float | None = None
    in_flight: int = 0
    waiting: int = 0
    asked: int = 0
    held: Mapping[str, int] = field(default_factory=dict)
    promoted: Mapping[str, int] = field(default_factory=dict)
    promised: int = 0
    oldest_wait_s: float = 0.0
    start_s: float | None = None
    call_s: float | None = None

    @property
    def floor(self) -> int:
        """Number of own pods that activators have claimed or wait for."""
        return len(self.held) + self.asked

    @property
    def bridging(self) -> int:
        """Number of instances in promoted pods, those that are expected included."""
        return len(self.promoted) + self.promised


class Members:
    """The members and their latest reports. Owner: the leader, by its monotonic clock."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, StoredReport]] = {}
        self._living: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"<Members {', '.join(sorted(self._last)) or 'empty'}>"

    def record(
        self, found: Mapping[str, StoredReport], now: float, *, living: Iterable[str] = ()
    ) -> None:
        """Record the reports in the store. `living`: the activators that are known to run."""
        self._living = frozenset(living)
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
        return (
            bool(self._last)
            and self._living <= self._last.keys()
            and all(now - reported_at <= SILENT_S for reported_at, _ in self._last.values())
        )

    def merged(self, key: str, now: float) -> RevisionLoad:
        """The aggregated load of one revision."""
        loads = [
            load
            for _, posted in self._last.values()
            if (load := posted.statement.get(key)) is not None
        ]
        return RevisionLoad(
            concurrency=sum(load.concurrency for load in loads) if self.is_whole(now) else None,
            in_flight=sum(load.in_flight for load in loads),
            waiting=sum(load.waiting for load in loads),
            asked=sum(load.asked for load in loads),
            held=_busiest(load.held for load in loads),
            promoted=_busiest(load.promoted for load in loads),
            promised=sum(load.promised for load in loads),
            oldest_wait_s=max((load.oldest_wait_s for load in loads), default=0.0),
            start_s=_longest(loads, "start_s"),
            call_s=_longest(loads, "call_s"),
        )


def _longest(loads: list[Load], name: str) -> float | None:
    return max(
        (value for load in loads if (value := getattr(load, name)) is not None), default=None
    )


def _busiest(counted: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Calls in each pod or instance; of one that two members claim for a moment the higher
    number."""
    calls: dict[str, int] = {}
    for one in counted:
        for name, number in one.items():
            calls[name] = max(number, calls.get(name, 0))
    return calls
