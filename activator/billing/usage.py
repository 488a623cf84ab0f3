"""Usage records as JSON text, fast: what is the same for all calls of a (key, method, instance) is
formatted once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation, localcontext
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from pilotlight.pricing import Footprint, Rates, billable_ns, kind_factor, rate_per_s
from pilotlight.spec import canonical_json

CALL = "CALL"
CPU = "CPU"
"""CPU time that an instance used while no call ran on it."""
SHADOW = "SHADOW"
"""The copy of a call: it costs nothing."""
PICO = 10**12
"""Picounits of one unit: costs are kept to them (pricing.COST_QUANTUM)."""
MAX_MAGNITUDE = 15
"""Power of ten beyond which a number is no amount of money, but a mistake or an attack on our
memory."""
_PREC = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSubject:
    """Whose use is recorded: the fields of a UsageRecord that an instance, a key, a method and a
    foreign caller fix."""

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
    """Formats the records of one subject. Immutable but for `segment` and `number`, where the
    journal notes its own copy.

    `kind` other than CALL gives the records of spans: their rate is that of their kind, no call is
    priced, and nothing is rounded up. Those of SHADOW cost nothing."""

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
        """What a call is billed for at least."""
        return self._rates.minimum_ms

    @property
    def rounding_ms(self) -> int:
        """The step of what it is billed for."""
        return self._rates.rounding_ms

    def picos(self, billed_ns: int, tokens_in: int = 0, tokens_out: int = 0) -> int:
        """Price in picounits, half to even, as `pricing.cost_of` has it; in integers, which is four
        times as fast."""
        if self._is_stepped:
            billed_ns = billable_ns(billed_ns, self._rates)
        amount = self._per_ns * billed_ns + self._per_request
        if tokens_in or tokens_out:
            amount += self._per_token_in * tokens_in + self._per_token_out * tokens_out
        return self._rounded(amount)

    def idle_picos(self, billed_ns: int) -> int:
        """Price of an attempt in which nothing ran (`pricing.BUSY`): its time alone."""
        return self._rounded(self._per_ns * billed_ns)

    def _rounded(self, amount: int) -> int:
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
        """A whole UsageRecord as one line of JSON (no newline). `started_ns` is wall time;
        `outcome` and `start_kind` are our own words.

        `mark`: what few records say (`marked`).
        """
        started_us = str((started_ns + 500) // 1000).zfill(7)  # a third of what `:.6f` takes
        return (
            f'{self._prefix},"id":{quoted(id)},"call":{quoted(call)},"attempt":{attempt},"start_kind":"{start_kind}",'
            f'"started_at":{started_us[:-6]}.{started_us[-6:]},"queued_ms":{queued_ms},"start_ms":{start_ms},"exec_ms":{exec_ms},'
            f'"billed_ns":{billed_ns},"tokens_in":{tokens_in},"tokens_out":{tokens_out},"bytes_in":{bytes_in},'
            f'"bytes_out":{bytes_out},"status":{status},"outcome":"{outcome}","cost":"{cost}"{mark}}}'
        ).encode()


def marked(**fields: str) -> str:
    """Fields of a record that few records have, as JSON members that each begin with a comma; those
    that are "" are left out."""
    return "".join(f',"{name}":{quoted(value)}' for name, value in fields.items() if value)


def marked_tokens(*, cached: int, finish: str, first_token_ms: int) -> str:
    """The same of a language model's call: tokens of its prompt that were there already, why it
    ended, when it began to answer."""
    mark = marked(finish=finish)
    if cached:
        mark += f',"tokens_cached":{cached}'
    return f'{mark},"first_token_ms":{first_token_ms}' if first_token_ms else mark


def cost_text(picos: int) -> str:
    """Picounits as decimal text in whole units, every digit written."""
    if picos < 0:
        return "-" + cost_text(-picos)
    whole, part = divmod(picos, PICO)
    return f"{whole}.{part:012d}"


def as_picos(text: str) -> int:
    """Decimal text in whole units as picounits. Raises ValueError when it is no finite decimal;
    digits beyond picounits are cut off."""
    try:
        value = Decimal(text)
    except (InvalidOperation, TypeError) as e:
        raise ValueError(f"{text!r} is not a decimal number") from e
    if not value.is_finite() or value.adjusted() > MAX_MAGNITUDE:
        raise ValueError(f"{text!r} is not an amount of money")
    with localcontext(prec=_PREC):
        return int(value * PICO)


def _as_integers(prices: tuple[Decimal, ...]) -> tuple[list[int], int]:
    """All prices as whole multiples of one power of ten, and how many of it make a picounit.
    Exact."""
    exponent = max(12, *(-int(price.as_tuple().exponent) for price in prices))
    with localcontext(prec=_PREC):
        return [int(price.scaleb(exponent)) for price in prices], 10 ** (exponent - 12)
