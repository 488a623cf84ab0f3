"""Figures shared by several pages: start times, utilisation of paid time and of GPUs, and use of
quotas. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal

from pilotlight.controller.analytics.environment_usage import START_KINDS, EnvironmentUsage
from pilotlight.controller.analytics.gpu_time import GpuTime, gpu_time
from pilotlight.controller.analytics.latency_histograms import LatencyHistogram, merge_histograms
from pilotlight.controller.analytics.rollup_queries import UsageCell, UsageSums
from pilotlight.controller.dashboard import formatting
from pilotlight.spec.pricing import CACHED
from pilotlight.spec.quotas import STORAGE_KEYS, Plan, Quotas
from snapshotter.types import InstanceInfo

PERCENTILES = (50, 95, 99)
_PAID_IDLE = ("IDLE", "RESERVED")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRow:
    """Calls by start kind of their instance.

    Attributes:
        share: of all calls.
        total_ms, start_ms: percentiles (50, 95, 99) of the whole call, and of the start alone.
        waited_ms: total time that callers waited for starts of this kind.
        mean_ms: the mean of that time per call.
    """

    kind: str
    calls: int
    share: float
    total_ms: tuple[float | None, ...]
    start_ms: tuple[float | None, ...]
    waited_ms: int
    mean_ms: float


def starts(usage: EnvironmentUsage, parts: Sequence[LatencyHistogram]) -> list[StartRow]:
    """Return one row per start kind that occurred, fastest first. Percentiles cover the last day,
    the other values the span."""
    sums = usage.by(lambda cell: cell.start_kind, calls_only=True)
    whole = sum(one.records for one in sums.values())
    return [
        StartRow(
            kind=kind,
            calls=found.records,
            share=found.records / whole,
            total_ms=_percentiles(parts, kind, "total"),
            start_ms=_percentiles(parts, kind, "start")
            if kind not in ("WARM", CACHED)
            else (None,) * len(PERCENTILES),
            waited_ms=found.start_ms,
            mean_ms=found.start_ms / found.records,
        )
        for kind in (*START_KINDS, *sorted(set(sums) - set(START_KINDS)))
        if (found := sums.get(kind)) is not None
    ]


def _percentiles(
    parts: Sequence[LatencyHistogram], kind: str, clock: str
) -> tuple[float | None, ...]:
    histogram = merge_histograms(
        part for part in parts if part.start_kind == kind and part.clock == clock
    )
    return tuple(histogram.percentile(percent) for percent in PERCENTILES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """The share of time that ran calls.

    Attributes:
        owner: `app/function`, or a tenant.
        busy: share between 0 and 1; of all time of granted GPUs if there is any, else of paid
            instance time. None without either.
        idle_s: paid time of instances that ran nothing, in seconds.
        gpus: time of granted GPUs by state.
        cost_idle: cost of the idle time.
    """

    owner: str
    busy: float | None
    busy_s: float
    idle_s: float
    gpus: GpuTime
    cost_idle: Decimal


def utilisation(owner: str, cells: Sequence[UsageCell]) -> Utilisation:
    """Return the utilisation of one owner's cells."""
    busy, idle = UsageSums(), UsageSums()
    for cell in cells:
        if cell.kind == "CALL":
            busy.add(cell.sums)
        elif cell.kind in _PAID_IDLE:
            idle.add(cell.sums)
    gpus, paid_s = gpu_time(cells), busy.billed_s + idle.billed_s
    return Utilisation(
        owner=owner,
        busy=gpus.utilisation if gpus.held_s else busy.billed_s / paid_s if paid_s else None,
        busy_s=busy.billed_s,
        idle_s=idle.billed_s,
        gpus=gpus,
        cost_idle=idle.cost,
    )


def by_owner(cells: Sequence[UsageCell]) -> list[Utilisation]:
    """Return one row per function, the most unused GPU time and paid idle time first."""
    owned: dict[str, list[UsageCell]] = {}
    for cell in cells:
        if cell.function:
            owned.setdefault(cell.name, []).append(cell)
    rows = [utilisation(owner, owner_cells) for owner, owner_cells in owned.items()]
    return sorted(rows, key=lambda row: (-row.gpus.unused_s, -row.idle_s, row.owner))


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRow:
    """A quota and its use. `used` is None if only the activators know it."""

    name: str
    bound: str
    used: str | None
    share: float | None


QUOTA_WORDS = {
    "requests_per_s": "Requests per second",
    "burst": "Burst of requests",
    "concurrent": "Concurrent calls",
    "queued": "Queued calls",
    "instances": "Instances",
    "gpus": "GPUs",
    "body_bytes": "Size of a request",
    "tokens_per_min": "Tokens per minute",
    "stored_bytes": "Stored",
    "builds_at_once": "Concurrent image builds",
    "pinned_bytes": "Pinned weights",
    "log_bytes": "Logs on a node",
    "functions": "Functions",
    "result_bytes": "Stored results",
    "volume_files": "Files of a volume",
}


def quotas(plan: Plan, used: Mapping[str, float]) -> list[QuotaRow]:
    """Return all quotas of a plan, limited or not, with their use where it is known."""
    names = (*(field.name for field in fields(Quotas)), *STORAGE_KEYS)
    return [_quota(name, getattr(plan, name), used.get(name)) for name in names]


def _quota(name: str, bound: float | None, used: float | None) -> QuotaRow:
    show = formatting.size if name.endswith("_bytes") else _plain
    share = used / bound if used is not None and bound else None
    return QuotaRow(
        name=QUOTA_WORDS[name],
        bound="unlimited" if bound is None else show(bound),
        used=None if used is None else show(used),
        share=share,
    )


def _plain(number: float) -> str:
    return f"{number:,.2g}" if number < 10 and number % 1 else formatting.count(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveRow:
    """A target of the plan and the actual value. `is_met` is None if there is nothing to
    compare."""

    name: str
    target: str
    actual: str
    is_met: bool | None


def objectives(
    plan: Plan, usage: EnvironmentUsage, parts: Sequence[LatencyHistogram]
) -> list[ObjectiveRow]:
    """Return the plan's objectives, compared over the span of `usage`."""
    calls = usage.calls
    p99_ms = merge_histograms(part for part in parts if part.clock == "total").percentile(99)
    answered = 1 - calls.errors / calls.records if calls.records else None
    busy = utilisation("", usage.cells).busy
    rows = (
        ("Latency, p99", plan.latency_p99_ms, p99_ms, formatting.milliseconds, "at most"),
        ("Calls answered", plan.availability, answered, _exact_percent, "at least"),
        ("Utilisation", plan.utilisation, busy, formatting.percent, "at least"),
    )
    return [
        ObjectiveRow(
            name=name,
            target=f"{bound} {show(target)}",
            actual=show(actual),
            is_met=_is_met(target, actual, bound),
        )
        for name, target, actual, show, bound in rows
        if target is not None
    ]


def _is_met(target: float, actual: float | None, bound: str) -> bool | None:
    if actual is None:
        return None
    return actual <= target if bound == "at most" else actual >= target


def _exact_percent(share: float | None) -> str:
    """Format a percentage with three decimals: objectives differ in the third nine."""
    return formatting.DASH if share is None else f"{100 * share:.3f}".rstrip("0").rstrip(".") + " %"


def instance_use(instances: Sequence[InstanceInfo], gpus: Mapping[str, int]) -> dict[str, float]:
    """Return instances and GPUs in use; `gpus` is the GPU count of an instance by function id."""
    gpu_count = sum(gpus.get(str(instance.revision).partition("@")[0], 0) for instance in instances)
    return {"instances": len(instances), "gpus": gpu_count}


def per_thousand(cost: Decimal, count: int) -> Decimal | None:
    """Return the cost of a thousand; None if the count is zero."""
    return cost * 1000 / count if count else None
