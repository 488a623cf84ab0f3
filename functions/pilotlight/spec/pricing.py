"""Pricing of calls: rates, and pure functions from measured usage to money.

Money is `Decimal` and never rounded in between: a price is rate times whole units, exact in 28
digits, and is stored with its record, so a bill is the plain sum of its records."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal, InvalidOperation, localcontext
from typing import Any

GIB = 1024**3
_NS_PER_S = Decimal(10**9)
_NS_PER_MS = 10**6
COST_QUANTUM = Decimal("1e-12")
"""Costs are stored in picounits: a millisecond of a hundredth of a core costs some 1e-9, a thousand
times more."""
BUSY, UNSENT = "busy", "unsent"
NOT_RUN = frozenset({BUSY, UNSENT})
"""Outcomes of attempts in which nothing ran, because the worker was still finishing another call,
or could not be sent the request (`is_free`)."""
BUSY_FREE_MS = 100
"""How long a worker may take to say that it is busy, in all answers of one instance together: it
takes some milliseconds, and is asked less and less often."""
CACHED = "CACHED"
"""In place of a start kind: the response cache answered, and nothing ran."""
_EXACT_DIGITS = 100
"""More than the digits of rate (28) times nanoseconds (17), so that a price is rounded only once,
at the end."""


def is_free(outcome: str, exec_ms: int, left_ms: int = BUSY_FREE_MS) -> bool:
    """Whether an attempt of this length costs nothing. That a worker was busy is the statement of
    its tenant's code, which may have computed until then. `left_ms`: what its instance has left of
    BUSY_FREE_MS."""
    return outcome == UNSENT or (outcome == BUSY and exec_ms <= left_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """A price list, in `currency`.

    Attributes:
        version: version of the list, stored in every record priced by it.
        cpu_core_s, memory_gib_s: price per second of one core, and of one GiB.
        gpu_s: price per second of one accelerator, by its kind: of a whole GPU (`H100`), or of a
            MIG instance of one profile (`H100-MIG-3g.40gb`).
        request: price per call that an instance answers.
        cache_hit: price per call that the response cache answers, instead of all others.
        token_in, token_out: price per token of a language model.
        start_factor: share of the execution rate charged while an instance starts; 0 = cold starts
            are not billed.
        idle_factor: the same while an instance is idle beyond the default scaledown_window.
        reserved_factor: the same while `min_instances` keeps it idle.
        cpu_factor: share of `cpu_core_s` charged per second of CPU time that an instance uses while
            no call runs on it.
        build_factor: the same per second of CPU time of an image build.
        snapshot_gib_month, weights_gib_month, volumes_gib_month: price of storage per GiB and 30
            days.
        minimum_ms: minimum duration billed for a call.
        rounding_ms: durations are rounded up to a multiple of this; 0 = billed to the nanosecond,
            so that the calls of an instance add up to its busy time."""

    version: str
    currency: str = "USD"
    cpu_core_s: Decimal = Decimal("0.0000131")
    memory_gib_s: Decimal = Decimal("0.00000222")
    gpu_s: Mapping[str, Decimal] = field(default_factory=dict)
    request: Decimal = Decimal(0)
    cache_hit: Decimal = Decimal(0)
    token_in: Decimal = Decimal(0)
    token_out: Decimal = Decimal(0)
    start_factor: Decimal = Decimal(0)
    idle_factor: Decimal = Decimal(1)
    reserved_factor: Decimal = Decimal(1)
    cpu_factor: Decimal = Decimal(1)
    build_factor: Decimal = Decimal(1)
    snapshot_gib_month: Decimal = Decimal(0)
    weights_gib_month: Decimal = Decimal(0)
    volumes_gib_month: Decimal = Decimal(0)
    minimum_ms: int = 0
    rounding_ms: int = 0

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values, with decimals as strings."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["gpu_s"] = {gpu: str(rate) for gpu, rate in self.gpu_s.items()}
        return {
            name: str(value) if isinstance(value, Decimal) else value
            for name, value in values.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The resources of one instance: cores, bytes, and its accelerators: their kind and number."""

    cpu: float
    memory_bytes: int
    gpu: str | None = None
    gpu_count: int = 0


GPU_S = {
    "H200": "0.001261",
    "H100": "0.001097",
    "A100": "0.000583",
    "L40S": "0.000542",
    "A10": "0.000306",
    "L4": "0.000222",
    "T4": "0.000164",
}
"""Default prices of a second of one GPU; platform.yaml overrides them. A kind without a price
cannot be requested."""
ANY_GPU = "any"
"""Requests a GPU of whatever kind; it is priced as the kind that was granted. `gpu_s.any` is the
price of kinds that the list does not name, if there is one."""
ONE_CORE = Footprint(cpu=1.0, memory_bytes=0)
"""Footprint of CPU and BUILD records, which measure CPU time: one second of it is one core's."""


def rate_per_s(footprint: Footprint, rates: Rates) -> Decimal:
    """Return the price of one second of an instance. Raises KeyError if its accelerator has no
    price."""
    cpu = Decimal(str(footprint.cpu)) * rates.cpu_core_s
    memory = Decimal(footprint.memory_bytes) / GIB * rates.memory_gib_s
    gpu = rates.gpu_s[footprint.gpu] * footprint.gpu_count if footprint.gpu else Decimal(0)
    return cpu + memory + gpu


def is_any_gpu(kind: str) -> bool:
    """Whether a requested kind stands for every kind."""
    return kind.lower() == ANY_GPU


def acceptable_gpus(requested: Sequence[str], rates: Rates) -> tuple[str, ...]:
    """Return the kinds that an instance may be granted, in the order of preference; `any` stands
    for every kind of the price list. Raises KeyError with the first one that has no price."""
    found: list[str] = []
    for kind in requested:
        if is_any_gpu(kind):
            if not rates.gpu_s:
                raise KeyError(kind)
            found += sorted(rates.gpu_s)
        elif kind not in rates.gpu_s:
            raise KeyError(kind)
        else:
            found.append(kind)
    return tuple(dict.fromkeys(found))


def price_name_of(granted: str, requested: Sequence[str], rates: Rates) -> str:
    """Return the name in the price list of a kind that was granted. Raises KeyError with the kind
    when it has no price."""
    if granted in rates.gpu_s:
        return granted
    if ANY_GPU in rates.gpu_s and any(map(is_any_gpu, requested)):
        return ANY_GPU
    raise KeyError(granted)


def dearest_gpu(requested: Sequence[str], rates: Rates) -> str | None:
    """Return the acceptable kind with the highest price, which is the worst case of a call; None
    without a GPU. Raises KeyError like `acceptable_gpus`."""
    return max(acceptable_gpus(requested, rates), key=lambda kind: rates.gpu_s[kind], default=None)


def price_duration(billed_ns: int, per_s: Decimal, per_request: Decimal = Decimal(0)) -> Decimal:
    """Return the price of `billed_ns` nanoseconds at `per_s` plus `per_request`, rounded to
    picounits (COST_QUANTUM), half to even."""
    with localcontext(prec=_EXACT_DIGITS):
        return (per_s * billed_ns / _NS_PER_S + per_request).quantize(COST_QUANTUM)


def picos_text(picos: int) -> str:
    """Format picounits as a decimal with twelve places."""
    return format(COST_QUANTUM * picos, "f")


def parse_picos(text: str) -> int:
    """Parse what `picos_text` wrote."""
    return int(Decimal(text) / COST_QUANTUM)


def billable_ns(billed_ns: int, rates: Rates) -> int:
    """Return the duration charged for a call of `billed_ns`: at least the minimum, and rounded
    up."""
    return charged_ns(billed_ns, minimum_ms=rates.minimum_ms, rounding_ms=rates.rounding_ms)


def charged_ns(billed_ns: int, *, minimum_ms: int, rounding_ms: int) -> int:
    """Return the duration charged for a call, like `billable_ns`, given the two numbers."""
    ns = max(billed_ns, minimum_ms * _NS_PER_MS)
    step = rounding_ms * _NS_PER_MS
    return -(-ns // step) * step if step else ns


class GpuState(enum.StrEnum):
    """What an instance does with the GPUs that it was granted. IDLE_FREE: idle, stopping, or kept
    for copies of calls, without a charge. IDLE_PAID: idle beyond the free window, or reserved."""

    START = "start"
    IDLE_FREE = "idle_free"
    IDLE_PAID = "idle_paid"
    BUSY = "busy"
    ASLEEP = "asleep"


FREE_START, FREE_IDLE, ASLEEP = "FREE_START", "FREE_IDLE", "ASLEEP"
"""Kinds of records that cost nothing and account for time of granted GPUs. Only instances with a
GPU have them."""
GPU_STATES: Mapping[str, GpuState] = {
    "START": GpuState.START,
    FREE_START: GpuState.START,
    FREE_IDLE: GpuState.IDLE_FREE,
    "IDLE": GpuState.IDLE_PAID,
    "RESERVED": GpuState.IDLE_PAID,
    "CALL": GpuState.BUSY,
    "SHADOW": GpuState.BUSY,
    ASLEEP: GpuState.ASLEEP,
}
"""The state that each kind of record measures; other kinds measure no GPU time."""
UNPAID_KINDS = frozenset({"SHADOW", FREE_START, FREE_IDLE, ASLEEP})
"""Kinds of records that cost nothing."""


def kind_factor(kind: str, rates: Rates) -> Decimal:
    """Return the share of the execution rate that this kind of record costs: 1 for a CALL, 0 for a
    SHADOW and for unpaid time."""
    factors = {
        "IDLE": rates.idle_factor,
        "RESERVED": rates.reserved_factor,
        "START": rates.start_factor,
        "CPU": rates.cpu_factor,
        "BUILD": rates.build_factor,
        **dict.fromkeys(UNPAID_KINDS, Decimal(0)),
    }
    return factors.get(kind, Decimal(1))


_FACTORS = ("start_factor", "idle_factor", "reserved_factor", "cpu_factor", "build_factor")
_AMOUNTS = (
    "cpu_core_s",
    "memory_gib_s",
    "request",
    "cache_hit",
    "token_in",
    "token_out",
    *_FACTORS,
    "snapshot_gib_month",
    "weights_gib_month",
    "volumes_gib_month",
)
_MAX_ROUNDING_MS = 3_600_000
_is_currency = re.compile(r"[A-Za-z0-9]{1,16}").fullmatch


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceSettings:
    """Section `prices` of platform.yaml. Decimals are strings, to avoid binary floating point.

    Attributes:
        others: further price lists by version, for plans that refer to one. They have the keys of
            this section except `version` and `others`, and inherit its values."""

    version: str = "2026-11-26"
    currency: str = "USD"
    cpu_core_s: str = "0.0000131"
    memory_gib_s: str = "0.00000222"
    gpu_s: Mapping[str, str] = field(default_factory=lambda: dict(GPU_S))
    request: str = "0"
    cache_hit: str = "0"
    token_in: str = "0"
    token_out: str = "0"
    start_factor: str = "0"
    idle_factor: str = "1"
    reserved_factor: str = "1"
    cpu_factor: str = "1"
    build_factor: str = "1"
    snapshot_gib_month: str = "0"
    weights_gib_month: str = "0"
    volumes_gib_month: str = "0"
    minimum_ms: int = 0
    rounding_ms: int = 0
    others: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.version or len(self.version) > 64:
            raise ValueError(f"version = {self.version!r}: must have 1 to 64 characters")
        if not _is_currency(self.currency):
            raise ValueError(
                f"currency = {self.currency!r}: must be 1 to 16 letters or digits, such as USD, "
                f"because it is part of file names"
            )
        for name in _AMOUNTS:
            _decimal(name, getattr(self, name))
        for gpu, rate in self.gpu_s.items():
            _decimal(f"gpu_s.{gpu}", rate)
        for name in ("minimum_ms", "rounding_ms"):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int)
                or not 0 <= value <= _MAX_ROUNDING_MS
            ):
                raise ValueError(f"{name} = {value!r}: must be between 0 and {_MAX_ROUNDING_MS}")
        for version in self.others:
            self._other(version)

    def _other(self, version: str) -> PriceSettings:
        changes = self.others[version]
        known = {f.name for f in fields(self)} - {"version", "others"}
        if not isinstance(changes, Mapping):
            raise ValueError(f"others.{version} = {changes!r}: must be a mapping")
        if unknown := sorted(set(changes) - known):
            raise ValueError(
                f"others.{version}.{unknown[0]}: unknown key; known: {', '.join(sorted(known))}"
            )
        if version == self.version:
            raise ValueError(f"others.{version}: is already the version of the default list")
        own = {name: getattr(self, name) for name in known}
        try:
            return PriceSettings(**{**own, **changes, "version": version})
        except ValueError as e:
            raise ValueError(f"others.{version}.{e}") from e

    def rates(self) -> Rates:
        """Return the default price list."""
        values = {name: Decimal(getattr(self, name)) for name in _AMOUNTS}
        gpu_s = {gpu: Decimal(rate) for gpu, rate in self.gpu_s.items()}
        whole = {"minimum_ms": self.minimum_ms, "rounding_ms": self.rounding_ms}
        return Rates(version=self.version, currency=self.currency, gpu_s=gpu_s, **values, **whole)  # type: ignore[arg-type]

    def lists(self) -> dict[str, Rates]:
        """Return all price lists by version, the default one first."""
        return {
            self.version: self.rates(),
            **{version: self._other(version).rates() for version in self.others},
        }


def _decimal(key: str, text: str) -> None:
    try:
        value = Decimal(text)
    except (InvalidOperation, TypeError, ValueError) as e:
        raise ValueError(
            f'{key} = {text!r}: must be a decimal number in quotes, such as "0.0000131"'
        ) from e
    if not value.is_finite() or value < 0:
        raise ValueError(f"{key} = {text!r}: must be 0 or more")
