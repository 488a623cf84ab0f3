"""Right-sizing hints: where a function pays for resources that it does not use, and the possible
saving. Pure.

Savings are per 30 days at the rate of the observed span. A hint states its evidence and changes
nothing itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import ROUND_HALF_EVEN, Decimal

from pilotlight.controller.analytics import gpu_use
from pilotlight.controller.analytics.gpu_time import GpuTime
from pilotlight.controller.analytics.gpu_use import GpuNow
from pilotlight.controller.analytics.rollup_queries import UsageSums
from pilotlight.spec.pricing import COST_QUANTUM, GIB, Rates

MONTH_S = 30 * 86_400
HEADROOM = 1.5
"""Factor on the highest measured memory, because usage may grow."""
STEP_BYTES = 128 * 1024**2
WORTH = Decimal("0.75")
"""A memory hint must cut memory by at least a quarter; below that, headroom is worth more."""
BUSY = 0.25
"""Utilisation from which a reserved instance is worth its cost."""
MIG_SLICES = 7
"""Compute slices of a GPU, of which a profile such as `3g.40gb` has three (NVIDIA MIG User
Guide)."""
_MIG = re.compile(r"(?P<gpu>.+)-MIG-(?P<slices>[1-7])g\.(?P<gib>[0-9]+)gb", re.IGNORECASE)
LEAST_SHARE, LEAST_OF_ALL = 20, 100
"""A hint must save more than 1/20 of its function's cost, and more than 1/100 of the cost of all
functions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedUsage:
    """One function as observed over a span.

    Attributes:
        memory_bytes: an instance's memory, as configured and billed.
        measured_bytes: the highest memory of an instance now; None if unknown.
        min_instances, waiting_cost: as deployed; a waiting cost is that of
            `scaledown_window="auto"`.
        whole, busy, idle, reserved: sums of all records that may cost something, of calls, of idle
            time beyond the platform's own window, and of `min_instances`.
        gpus: time of its GPUs by state.
        gpus_now: the use of its GPUs now; () if not known.
        start_ms: median time of a start that is not warm; None if unknown.
    """

    app: str
    name: str
    memory_bytes: int
    measured_bytes: int | None
    min_instances: int
    waiting_cost: float | None
    whole: UsageSums
    busy: UsageSums
    idle: UsageSums
    reserved: UsageSums
    start_ms: float | None
    gpus: GpuTime = field(default_factory=GpuTime)
    gpus_now: tuple[GpuNow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RightsizingHint:
    """A suggested reduction.

    Attributes:
        change: what to write, as code.
        saving: per 30 days.
    """

    app: str
    name: str
    change: str
    why: str
    saving: Decimal


def rightsizing_hints(
    observed: Sequence[ObservedUsage], *, rates: Rates, elapsed_s: float
) -> list[RightsizingHint]:
    """Return possible savings, largest first. `elapsed_s` is the time that the sums cover, in
    seconds."""
    pace = Decimal(MONTH_S) / Decimal(max(1, round(elapsed_s)))
    found = [
        hint
        for one in observed
        for hint in (
            _memory(one, rates, pace),
            _reserved(one, pace),
            _idle(one, pace),
            _mig(one, rates, pace),
        )
        if hint is not None
    ]
    least = sum((one.whole.cost for one in observed), Decimal(0)) * pace / LEAST_OF_ALL
    worth = {
        (one.app, one.name): max(least, one.whole.cost * pace / LEAST_SHARE) for one in observed
    }
    return sorted(
        (h for h in found if h.saving > worth[h.app, h.name]),
        key=lambda hint: (-hint.saving, hint.app, hint.name),
    )


def _memory(one: ObservedUsage, rates: Rates, pace: Decimal) -> RightsizingHint | None:
    if one.measured_bytes is None:
        return None
    enough = max(STEP_BYTES, -(-round(one.measured_bytes * HEADROOM) // STEP_BYTES) * STEP_BYTES)
    if not one.memory_bytes or enough > one.memory_bytes * WORTH:
        return None
    spent = Decimal(repr(one.whole.memory_byte_s)) / GIB * rates.memory_gib_s
    saving = _rounded(spent * (1 - Decimal(enough) / one.memory_bytes) * pace)
    used, limit = one.measured_bytes // 1024**2, one.memory_bytes // 1024**2
    return RightsizingHint(
        app=one.app,
        name=one.name,
        change=f'memory="{enough // 1024**2}MiB"',
        saving=saving,
        why=f"instances use {used} MiB of {limit} MiB now; this leaves 50 % headroom",
    )


def _reserved(one: ObservedUsage, pace: Decimal) -> RightsizingHint | None:
    reserved_ns = one.reserved.billed_ns + one.busy.billed_ns
    if one.reserved.picos <= 0 or one.busy.billed_ns >= reserved_ns * BUSY:
        return None
    start = (
        ""
        if one.start_ms is None
        else f"; the first call after a pause then waits {one.start_ms / 1000:.2g} s for a start"
    )
    return RightsizingHint(
        app=one.app,
        name=one.name,
        change="min_instances=0",
        saving=_rounded(one.reserved.cost * pace),
        why=f"{one.min_instances or 'the'} reserved instances are busy "
        f"{100 * one.busy.billed_ns / reserved_ns:.0f} % of their time{start}{_gpus(one)}",
    )


def _idle(one: ObservedUsage, pace: Decimal) -> RightsizingHint | None:
    if one.idle.picos <= 0:
        return None
    share = 100 * one.idle.billed_ns / max(1, one.whole.billed_ns)
    is_auto = one.waiting_cost is not None
    waits = "; calls after a longer pause then wait for a start" if is_auto else ""
    return RightsizingHint(
        app=one.app,
        name=one.name,
        change="scaledown_window=60" if is_auto else 'scaledown_window="auto"',
        saving=_rounded(one.idle.cost * pace),
        why=f"{share:.0f} % of the billed time is idle beyond the platform's free minutes; this is "
        f"the maximum saving{waits}{_gpus(one)}",
    )


def _gpus(one: ObservedUsage) -> str:
    time = f"; of GPU time {one.gpus.describe()}" if one.gpus.held_s else ""
    now = gpu_use.describe(one.gpus_now)
    return f"{time}; {now}" if now else time


def _mig(one: ObservedUsage, rates: Rates, pace: Decimal) -> RightsizingHint | None:
    """Suggest the cheapest MIG instance of the same GPU that has a price, and the memory and the
    share of compute that the function uses now, with HEADROOM."""
    kinds = {gpu.gpu for gpu in one.gpus_now}
    if len(kinds) != 1 or any(gpu.sm_utilisation is None for gpu in one.gpus_now):
        return None
    (kind,) = kinds
    used_bytes = max(gpu.used_bytes for gpu in one.gpus_now) * HEADROOM
    busy = max(gpu.sm_utilisation or 0.0 for gpu in one.gpus_now) * HEADROOM
    fitting = {
        name: price
        for name, price in rates.gpu_s.items()
        if (part := _MIG.fullmatch(name)) is not None
        and part["gpu"].upper() == kind.upper()
        and int(part["gib"]) * GIB >= used_bytes
        and int(part["slices"]) / MIG_SLICES >= busy
    }
    price = rates.gpu_s.get(kind)
    if not fitting or price is None or min(fitting.values()) >= price:
        return None
    name = min(fitting, key=lambda name: (fitting[name], name))
    spent = price * Decimal(repr(one.gpus.paid_s))
    return RightsizingHint(
        app=one.app,
        name=one.name,
        change=f'gpu="{name}"',
        saving=_rounded(spent * (1 - fitting[name] / price) * pace),
        why=f"{gpu_use.describe(one.gpus_now)}; this leaves 50 % headroom",
    )


def _rounded(amount: Decimal) -> Decimal:
    return amount.quantize(COST_QUANTUM, rounding=ROUND_HALF_EVEN)
