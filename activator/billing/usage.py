"""Usage records as JSON text, fast: what is the same for all calls of a (key, method, instance) is formatted once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from pilotlight.pricing import Footprint, Rates, price, rate_per_s
from pilotlight.spec import canonical_json

CALL = "CALL"


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

    __slots__ = ("_per_request", "_prefix", "_rate", "fixed", "instance", "number", "request_price", "segment")

    def __init__(self, subject: UsageSubject, *, footprint: Footprint, rates: Rates, kind: str = CALL) -> None:
        """Raises KeyError when the footprint's accelerator has no price."""
        per_s = rate_per_s(footprint, rates)
        self._rate = per_s if kind == CALL else per_s * rates.idle_factor
        self._per_request = rates.request if kind == CALL else Decimal(0)
        self.request_price = str(self._per_request)
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
            "rate_per_s": str(self._rate),
        }
        self._prefix = canonical_json(self.fixed).decode()[:-1]
        self.segment = 0
        self.number = 0

    def cost(self, billed_ns: int) -> str:
        """Price of `billed_ns`, as decimal text without exponent."""
        return f"{price(billed_ns, self._rate, self._per_request):f}"

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
