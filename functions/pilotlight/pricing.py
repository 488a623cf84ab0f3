"""What a call costs: rates, and a pure function from measured use to money.

Money is `Decimal` and never rounded on the way: a price is rate times whole units, exact in 28 digits, and is stored with its
record, so a bill is the plain sum of its records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal

GIB = 1024**3
_NS_PER_S = Decimal(10**9)
COST_QUANTUM = Decimal("1e-12")
"""Costs are kept to the picounit: a millisecond of a hundredth of a core costs some 1e-9, a thousand times more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Prices of one version, in `currency`.

    Attributes:
        version: names these prices in every record that used them.
        cpu_core_s, memory_gib_s: per second of one core, of one GiB.
        gpu_s: per second of one accelerator, by its name.
        request: per call.
        idle_factor: share of the execution rate charged while an instance idles beyond the platform's own scaledown_window,
            or is held by `min_instances`.
    """

    version: str
    currency: str = "USD"
    cpu_core_s: Decimal = Decimal("0.0000131")
    memory_gib_s: Decimal = Decimal("0.00000222")
    gpu_s: Mapping[str, Decimal] = field(default_factory=dict)
    request: Decimal = Decimal(0)
    idle_factor: Decimal = Decimal(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What one instance occupies: cores, bytes, accelerators by name."""

    cpu: float
    memory_bytes: int
    gpu: str | None = None
    gpu_count: int = 0


def rate_per_s(footprint: Footprint, rates: Rates) -> Decimal:
    """Price of one second of the whole instance. Raises KeyError when its accelerator has no price."""
    cpu = Decimal(str(footprint.cpu)) * rates.cpu_core_s
    memory = Decimal(footprint.memory_bytes) / GIB * rates.memory_gib_s
    gpu = rates.gpu_s[footprint.gpu] * footprint.gpu_count if footprint.gpu else Decimal(0)
    return cpu + memory + gpu


def price(billed_ns: int, per_s: Decimal, per_request: Decimal = Decimal(0)) -> Decimal:
    """Price of `billed_ns` nanoseconds at `per_s`, plus a call's own price, to the picounit (COST_QUANTUM)."""
    return (per_s * billed_ns / _NS_PER_S + per_request).quantize(COST_QUANTUM)
