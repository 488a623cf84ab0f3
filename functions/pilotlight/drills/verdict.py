"""What a drill found: failed calls, how long, and what was lost. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pilotlight.loadtest.results import Result, nearest_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """The calls of one drill.

    Attributes:
        calls, failed: numbers of calls. errors: how many failed in which way.
        unavailable_s: from when the first call was due that failed until the first good answer
            after the last failure; 0 without a failure.
        before_p99_ms, after_p99_ms: latency of good calls that were due before, and after, the
            fault. slowest_ms: of all of them.
    """

    calls: int
    failed: int
    errors: Mapping[str, int]
    unavailable_s: float
    before_p99_ms: float | None
    after_p99_ms: float | None
    slowest_ms: float | None


def outage_of(results: Sequence[Result], *, fault_s: float) -> Outage:
    """Summarize calls, ordered by when they were due. `fault_s`: when it began, in seconds from the
    first call."""
    bad = [r for r in results if not r.is_good]
    good = [r for r in results if r.is_good]
    unavailable_s = 0.0
    if bad:
        ended_s = max(r.due_s + r.latency_ms / 1000 for r in bad)
        back = [r.due_s + r.latency_ms / 1000 for r in good if r.due_s > bad[-1].due_s]
        unavailable_s = max(ended_s, min(back, default=ended_s)) - bad[0].due_s
    return Outage(
        calls=len(results),
        failed=len(bad),
        errors=dict(Counter(r.error or str(r.status) for r in bad)),
        unavailable_s=unavailable_s,
        before_p99_ms=_p99(r.latency_ms for r in good if r.due_s < fault_s),
        after_p99_ms=_p99(r.latency_ms for r in good if r.due_s >= fault_s),
        slowest_ms=max((r.latency_ms for r in good), default=None),
    )


def _p99(values: Iterable[float]) -> float | None:
    ordered = sorted(values)
    return nearest_rank(ordered, 0.99) if ordered else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Whether answered calls were billed.

    Attributes:
        checked: answered calls that were looked for. missing: ids without a record.
        doubled: ids with more than one.
        rpo_s: age, when the fault began, of the oldest answer without a record; 0 without one, or
            if all of them came later.
    """

    checked: int
    missing: Sequence[str] = ()
    doubled: Sequence[str] = ()
    rpo_s: float = 0.0


def ledger_of(results: Sequence[Result], records: Mapping[str, int], *, fault_s: float) -> Ledger:
    """Compare answers with `records`, the number of records by request id."""
    answered = [r for r in results if r.is_good and r.id]
    missing = [r for r in answered if not records.get(r.id)]
    oldest_s = min((r.due_s + r.latency_ms / 1000 for r in missing), default=fault_s)
    return Ledger(
        checked=len(answered),
        missing=tuple(r.id for r in missing),
        doubled=tuple(r.id for r in answered if records.get(r.id, 0) > 1),
        rpo_s=max(0.0, fault_s - oldest_s),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """Background calls that were accepted before the fault. `failed`: those that ended with an
    error. `lost`: those without an end."""

    accepted: int = 0
    failed: Sequence[str] = ()
    lost: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillReport:
    """The report of one drill. Its JSON form is `to_json`.

    Attributes:
        fault, summary: its name and what it did.
        recovered_s: from its beginning, or the end of one that lasts, until what failed was back
            and a call was answered again; None = not within the drill's timeout.
        problems: why the verdict is not good; empty if it is.
    """

    fault: str
    summary: str
    target: str
    recovered_s: float | None
    outage: Outage
    ledger: Ledger
    submitted: Submitted
    problems: Sequence[str] = field(default=())

    @property
    def passed(self) -> bool:
        """The verdict."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        o, led = self.outage, self.ledger
        return {
            "fault": self.fault,
            "summary": self.summary,
            "target": self.target,
            "passed": self.passed,
            "problems": list(self.problems),
            "rto_s": self.recovered_s,
            "rpo_s": led.rpo_s,
            "calls": o.calls,
            "failed": o.failed,
            "errors": dict(o.errors),
            "unavailable_s": o.unavailable_s,
            "before_p99_ms": o.before_p99_ms,
            "after_p99_ms": o.after_p99_ms,
            "slowest_ms": o.slowest_ms,
            "records_checked": led.checked,
            "records_missing": list(led.missing),
            "records_doubled": list(led.doubled),
            "submitted": self.submitted.accepted,
            "submitted_failed": list(self.submitted.failed),
            "submitted_lost": list(self.submitted.lost),
        }


def problems_of(
    *,
    recovered_s: float | None,
    timeout_s: float,
    outage: Outage,
    max_outage_s: float,
    ledger: Ledger,
    submitted: Submitted,
    findings: Sequence[str],
) -> list[str]:
    """What is not as it should be, a sentence each."""
    found = []
    if recovered_s is None:
        found.append(f"what failed was not back within {timeout_s:g} s")
    if outage.unavailable_s > max_outage_s:
        found.append(
            f"calls failed for {outage.unavailable_s:.1f} s, more than --max-outage "
            f"{max_outage_s:g}s"
        )
    if ledger.missing:
        found.append(f"{len(ledger.missing)} answered calls have no usage record")
    if ledger.doubled:
        found.append(f"{len(ledger.doubled)} answered calls have more than one usage record")
    if submitted.lost:
        found.append(f"{len(submitted.lost)} accepted calls have no result")
    return [*found, *findings]
