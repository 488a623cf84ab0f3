"""Counters of one revision and arm between two posts: plain numbers and lists, because every call
adds to them.

A finished call is in exactly one of `answered`, `failed`, `refused` and `cancelled`. Of the
answered ones, a degraded one is in no clock; each other one is in exactly one of the clocks `cold`
(it waited for a start), `first_byte` (it streamed) and `warm`, so that no call counts against two
of the budgets that use these clocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from pilotlight.spec.observations import LATENCY_BOUNDS, MAX_BUCKET, Observation
from pilotlight.spec.policies import STAGES, Objectives

AT_ONCE_MS = 1.0
"""A call that reached its worker within this time had each earlier stage in bucket 0: it is counted
once, not stage by stage."""
_BEFORE = ("route", "admit", "queue")
_WHY = frozenset({"raised", "invalid", "crashed", "late"})


class StatsBucket:
    """Counters of one revision and arm. Owner: the event loop."""

    __slots__ = (
        "answered",
        "at_once",
        "at_once_ms",
        "budgets_ms",
        "cancelled",
        "clocks",
        "cold",
        "compared",
        "cost_picos",
        "crashed",
        "degraded",
        "exec",
        "exec_budget_ms",
        "exec_ms",
        "failed",
        "invalid",
        "late",
        "matched",
        "out_of_memory",
        "overruns",
        "raised",
        "records",
        "refused",
        "skipped",
        "starts",
        "starts_failed",
        "streams",
        "streams_completed",
        "tokens_cached",
        "tokens_in",
        "tokens_out",
        "warm",
    )

    def __init__(self, objectives: Objectives) -> None:
        self.answered = self.failed = self.refused = self.cancelled = 0
        self.degraded = self.cold = self.raised = self.invalid = self.crashed = self.late = 0
        self.starts = self.starts_failed = self.streams = self.streams_completed = 0
        self.records = self.cost_picos = self.tokens_in = self.tokens_out = self.tokens_cached = (
            self.out_of_memory
        ) = 0
        self.compared = self.matched = self.skipped = 0
        self.exec_ms = 0.0
        self.at_once = 0
        self.warm = [0] * (MAX_BUCKET + 1)
        self.exec = [0] * (MAX_BUCKET + 1)
        self.clocks: dict[str, dict[int, int]] = {}
        self.overruns: dict[str, int] = {}
        self.budgets_ms = {
            stage: seconds * 1000 for stage, seconds in objectives.budgets_s().items()
        }
        self.exec_budget_ms = self.budgets_ms["exec"]
        self.at_once_ms = min(AT_ONCE_MS, *(self.budgets_ms[stage] for stage in _BEFORE))

    def __repr__(self) -> str:
        return (
            f"<Tally {self.answered} answered, {self.failed} failed, {self.refused} refused, "
            f"{self.cancelled} cancelled>"
        )

    def clock(self, name: str, ms: float) -> None:
        """Add a call to a clock."""
        buckets = self.clocks.setdefault(name, {})
        bucket = bisect_left(LATENCY_BOUNDS, ms)
        buckets[bucket] = buckets.get(bucket, 0) + 1

    def add(self, name: str, counts: Mapping[int, int]) -> None:
        """Add several calls, by bucket."""
        _add(self.clocks, name, counts)

    def stages(self, stages_ms: Mapping[str, float]) -> None:
        """Add the stages of an answered call, and count the ones over their budget."""
        for stage, ms in stages_ms.items():
            self.clock(stage, ms)
            if ms > self.budgets_ms[stage]:
                self.overruns[stage] = self.overruns.get(stage, 0) + 1

    def failure(self, why: str) -> None:
        """Count a call that failed in the platform or the function: `raised`, `invalid`, `crashed`,
        `late`, or another reason."""
        self.failed += 1
        if why in _WHY:
            setattr(self, why, getattr(self, why) + 1)

    def to_observation(
        self, *, tenant: str, function_id: str, revision: str, arm: str, minute: int
    ) -> Observation:
        """The counts as an observation."""
        latency = {name: dict(buckets) for name, buckets in self.clocks.items()}
        for name, counts in (("warm", self.warm), ("exec", self.exec)):
            _add(latency, name, {bucket: count for bucket, count in enumerate(counts) if count})
        if self.at_once:
            for name in (*_BEFORE, "start"):
                _add(latency, name, {0: self.at_once})
        counted: dict[str, Any] = {name: getattr(self, name) for name in _PLAIN}
        return Observation(
            tenant=tenant,
            function_id=function_id,
            revision=revision,
            arm=arm,
            minute=minute,
            **counted,
            calls_billed=self.records,
            exec_ms=round(self.exec_ms),
            overruns=dict(self.overruns),
            latency=latency,
        )


_PLAIN = (
    "answered",
    "failed",
    "refused",
    "cancelled",
    "degraded",
    "cold",
    "raised",
    "invalid",
    "crashed",
    "late",
    "starts",
    "starts_failed",
    "streams",
    "streams_completed",
    "cost_picos",
    "tokens_in",
    "tokens_out",
    "tokens_cached",
    "out_of_memory",
    "compared",
    "matched",
    "skipped",
)


def _add(latency: dict[str, dict[int, int]], name: str, counts: Mapping[int, int]) -> None:
    if counts:
        buckets = latency.setdefault(name, {})
        for bucket, count in counts.items():
            buckets[bucket] = buckets.get(bucket, 0) + count


def stages_of(
    *, route_ms: float, admit_ms: float, queue_ms: float, start_ms: float, exec_ms: float
) -> dict[str, float]:
    """Milliseconds by stage, in the order of `STAGES`."""
    return dict(zip(STAGES, (route_ms, admit_ms, queue_ms, start_ms, exec_ms), strict=True))
