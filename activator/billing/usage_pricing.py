"""Prices calls (rates by nanoseconds, in integer picounits) and formats their usage records as JSON
text. The part that all calls of a (key, method, instance) share is formatted once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation, localcontext
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from pilotlight.spec.pricing import Footprint, Rates, billable_ns, kind_factor, rate_per_s
from pilotlight.spec.record_json import canonical_json

CALL = "CALL"
CPU = "CPU"
"""CPU time that an instance used while it ran no call."""
SHADOW = "SHADOW"
"""The mirrored copy of a call, which costs nothing."""
PICO = 10**12
"""Picounits per unit of currency: the precision of costs (pricing.COST_QUANTUM)."""
MAX_MAGNITUDE = 15
"""Largest accepted power of ten of an amount. A larger number is a mistake or an attempt to exhaust
memory."""
_PREC = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSubject:
    """Identifies whose usage is recorded: the UsageRecord fields that an instance, a key, a method
    and a caller of another tenant determine."""

    tenant: str
    environment: str
    app: str
    function: str
    function_id: str
    method: str = ""
    revision: str
    instance: str
    key: str = ""
    caller: str = ""


class UsageTemplate:
    """Formats the records of one subject. Immutable except for `segment` and `number`, in which the
    journal records where it wrote the template.

    A `kind` other than CALL formats records of time spans: they use the rate of their kind, have no
    price per request, and are not rounded up. Records of kind SHADOW cost nothing."""

    __slots__ = (
        "_half",
        "_is_stepped",
        "_per_ns",
        "_per_request",
        "_per_token_in",
        "_per_token_out",
        "_prefix",
        "_rates",
        "_unit",
        "fixed",
        "instance",
        "number",
        "request_price",
        "segment",
    )

    def __init__(
        self, subject: UsageSubject, *, footprint: Footprint, rates: Rates, kind: str = CALL
    ) -> None:
        """Raises KeyError when the footprint's accelerator has no price."""
        is_call = kind == CALL
        rate = rate_per_s(footprint, rates) * kind_factor(kind, rates)
        request = rates.request if is_call else Decimal(0)
        tokens = (rates.token_in, rates.token_out) if kind != SHADOW else (Decimal(0), Decimal(0))
        prices = (rate.scaleb(-9), request, *tokens)
        (self._per_ns, self._per_request, self._per_token_in, self._per_token_out), self._unit = (
            _as_integers(prices)
        )
        self._half = self._unit // 2
        self._rates = rates
        self._is_stepped = is_call and bool(rates.minimum_ms or rates.rounding_ms)
        self.request_price = str(request)
        self.instance = subject.instance
        self.fixed: Mapping[str, Any] = {
            "kind": kind,
            **{name: getattr(subject, name) for name in subject.__dataclass_fields__},
            "cpu": footprint.cpu,
            "memory_bytes": footprint.memory_bytes,
            "gpu": footprint.gpu,
            "gpu_count": footprint.gpu_count,
            "price_version": rates.version,
            "currency": rates.currency,
            "rate_per_s": str(rate),
        }
        self._prefix = canonical_json(self.fixed).decode()[:-1]
        self.segment = 0
        self.number = 0

    @property
    def minimum_ms(self) -> int:
        """Minimum billed time of a call."""
        return self._rates.minimum_ms

    @property
    def rounding_ms(self) -> int:
        """Step to which the billed time of a call is rounded up."""
        return self._rates.rounding_ms

    def picos(self, billed_ns: int, tokens_in: int = 0, tokens_out: int = 0) -> int:
        """Price in picounits, rounded half to even like `pricing.price_duration`. Integer
        arithmetic, which is four times as fast."""
        if self._is_stepped:
            billed_ns = billable_ns(billed_ns, self._rates)
        amount = self._per_ns * billed_ns + self._per_request
        if tokens_in or tokens_out:
            amount += self._per_token_in * tokens_in + self._per_token_out * tokens_out
        pico, rest = divmod(amount, self._unit)
        if rest > self._half or (rest == self._half and pico & 1 and self._unit > 1):
            pico += 1
        return pico

    def cost(self, billed_ns: int) -> str:
        """`picos` as decimal text in whole units."""
        return cost_text(self.picos(billed_ns))

    def record(
        self,
        *,
        id: str,
        call: str,
        attempt: int,
        start_kind: str,
        started_ns: int,
        queued_ms: int,
        start_ms: int,
        exec_ms: int,
        billed_ns: int,
        cost: str,
        status: int,
        outcome: str,
        tokens_in: int = 0,
        tokens_out: int = 0,
        bytes_in: int = 0,
        bytes_out: int = 0,
        mark: str = "",
    ) -> bytes:
        """Format a complete UsageRecord as one line of JSON (no newline). `started_ns` is wall
        time; `outcome` and `start_kind` are trusted constants and are not escaped.

        `mark`: rarely used fields, formatted by `encode_optional_fields`."""
        started_us = str((started_ns + 500) // 1000).zfill(7)  # a third of what `:.6f` takes
        return (
            f'{self._prefix},"id":{quoted(id)},"call":{quoted(call)},"attempt":{attempt},"start_kind":"{start_kind}",'
            f'"started_at":{started_us[:-6]}.{started_us[-6:]},"queued_ms":{queued_ms},"start_ms":{start_ms},"exec_ms":{exec_ms},'
            f'"billed_ns":{billed_ns},"tokens_in":{tokens_in},"tokens_out":{tokens_out},"bytes_in":{bytes_in},'
            f'"bytes_out":{bytes_out},"status":{status},"outcome":"{outcome}","cost":"{cost}"{mark}}}'
        ).encode()


def encode_optional_fields(**fields: str) -> str:
    """Format rarely used record fields as JSON members, each with a leading comma. Empty values are
    left out."""
    return "".join(f',"{name}":{quoted(value)}' for name, value in fields.items() if value)


def marked_tokens(*, cached: int, finish: str, first_token_ms: int) -> str:
    """Like `encode_optional_fields`, for the call of a language model: cached prompt tokens, finish
    reason, and time to first token."""
    mark = encode_optional_fields(finish=finish)
    if cached:
        mark += f',"tokens_cached":{cached}'
    return f'{mark},"first_token_ms":{first_token_ms}' if first_token_ms else mark


def cost_text(picos: int) -> str:
    """Format picounits as decimal text in whole units, with all 12 decimal places."""
    if picos < 0:
        return "-" + cost_text(-picos)
    digits = str(picos).zfill(13)  # two thirds of what divmod and `:012d` take
    return f"{digits[:-12]}.{digits[-12:]}"


def to_picos(text: str) -> int:
    """Parse decimal text in whole units as picounits. Digits beyond picounits are truncated. Raises
    ValueError when it is not a finite decimal."""
    try:
        value = Decimal(text)
    except (InvalidOperation, TypeError) as e:
        raise ValueError(f"{text!r} is not a decimal number") from e
    if not value.is_finite() or value.adjusted() > MAX_MAGNITUDE:
        raise ValueError(f"{text!r} is not an amount of money")
    with localcontext(prec=_PREC):
        return int(value * PICO)


def _as_integers(prices: tuple[Decimal, ...]) -> tuple[list[int], int]:
    """Express all prices as integers of one power of ten, and return how many of it make a
    picounit. Exact."""
    exponent = max(12, *(-int(price.as_tuple().exponent) for price in prices))
    with localcontext(prec=_PREC):
        return [int(price.scaleb(exponent)) for price in prices], 10 ** (exponent - 12)
