"""Usage records as JSON text, fast: what is the same for all calls of a (key, method, instance) is formatted once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, localcontext
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from pilotlight.pricing import Footprint, Rates, rate_per_s
from pilotlight.spec import canonical_json

CALL = "CALL"
_PICO = 10**12
_PREC = 100
"""Costs are kept to the picounit (pricing.COST_QUANTUM)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSubject:
    """Whose use is recorded: the fields of a UsageRecord that an instance, a key and a method fix."""

    tenant: str
    environment: str
    app: str
    function: str
    function_id: str
    method: str = ""
    revision: str
    instance: str
    key: str = ""


class UsageTemplate:
    """Formats the records of one subject. Immutable but for `segment` and `number`, where the journal notes its own copy.

    `kind` other than CALL gives the records of idle spans: their rate is the idle rate, and no call is priced.
    """

    __slots__ = ("_half", "_per_ns", "_per_request", "_prefix", "_unit", "fixed", "instance", "number", "request_price", "segment")

    def __init__(self, subject: UsageSubject, *, footprint: Footprint, rates: Rates, kind: str = CALL) -> None:
        """Raises KeyError when the footprint's accelerator has no price."""
        per_s = rate_per_s(footprint, rates)
        rate = per_s if kind == CALL else per_s * rates.idle_factor
        request = rates.request if kind == CALL else Decimal(0)
        self._per_ns, self._per_request, self._unit = _as_integers(rate.scaleb(-9), request)
        self._half = self._unit // 2
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

    def cost(self, billed_ns: int) -> str:
        """Price of `billed_ns` to the picounit, half to even, as `pricing.price` has it; in integers, which is four times as fast."""
        pico, rest = divmod(self._per_ns * billed_ns + self._per_request, self._unit)
        if rest > self._half or (rest == self._half and pico & 1 and self._unit > 1):
            pico += 1
        whole, part = divmod(pico, _PICO)
        return f"{whole}.{part:012d}"

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
    ) -> bytes:
        """A whole UsageRecord as one line of JSON (no newline). `started_ns` is wall time; `outcome` and `start_kind` are our own words."""
        return (
            f'{self._prefix},"id":{quoted(id)},"call":{quoted(call)},"attempt":{attempt},"start_kind":"{start_kind}",'
            f'"started_at":{started_ns / 1e9:.6f},"queued_ms":{queued_ms},"start_ms":{start_ms},"exec_ms":{exec_ms},'
            f'"billed_ns":{billed_ns},"tokens_in":{tokens_in},"tokens_out":{tokens_out},"bytes_in":{bytes_in},'
            f'"bytes_out":{bytes_out},"status":{status},"outcome":"{outcome}","cost":"{cost}"}}'
        ).encode()


def _as_integers(per_ns: Decimal, per_request: Decimal) -> tuple[int, int, int]:
    """Both prices as whole multiples of one power of ten, and how many of it make a picounit. Exact."""
    exponent = max(12, *(-int(price.as_tuple().exponent) for price in (per_ns, per_request)))
    with localcontext(prec=_PREC):
        return int(per_ns.scaleb(exponent)), int(per_request.scaleb(exponent)), 10 ** (exponent - 12)
