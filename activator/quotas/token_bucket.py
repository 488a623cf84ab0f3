"""Decides whether a call is admitted: token buckets (Turner 1986) for rates, counters for
concurrency. Pure; `now` in seconds of one clock.

A call requests an amount of requests, concurrent calls and tokens from *every* meter that applies,
and gets all or nothing (a request for more tokens than one minute allows counts as one minute's
amount). A refusal names the meter with the longest wait. A clock that steps back changes nothing.
`scripts` has the same decision in Lua, and the contract tests hold both to the same answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from activator.quotas.rules import Rule
from pilotlight import errors
from pilotlight.spec.quotas import Quotas

HELD_WAIT_S = 1.0
"""When to retry after too many concurrent calls: when one of them will end is unknown."""
_EPSILON = 1e-9
"""Tolerance in tokens, so that rounding errors do not refuse a caller that waited exactly as long
as required."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a call is not admitted.

    Attributes:
        quota: the name in `Quotas`.
        limit: its value.
        wait_s: seconds until a retry may succeed."""

    rule: Rule
    quota: str
    limit: float
    wait_s: float

    def error(self) -> errors.OverQuota:
        """The error for the caller."""
        rule = self.rule
        if rule.of == "streams":
            return errors.OverQuota(
                f"this tenant already has {self.limit:g} running calls of this function, the limit "
                f"(max_streams_per_tenant): wait for one to end",
                retry_after_s=self.wait_s,
                quota="max_streams_per_tenant",
                of=rule.of,
                limit=self.limit,
            )
        if not rule.is_shown:
            return errors.OverQuota(
                f"the tenant of this function has used up its quota {self.quota}: try again later",
                retry_after_s=self.wait_s,
                quota=self.quota,
                of=rule.of,
            )
        used = (
            f"requests to sandboxes and about submitted calls have used up {self.quota} = "
            f"{self.limit:g}: send fewer, or less data in them"
            if rule.of == "operations"
            else f"quota {self.quota} = {self.limit:g} of this {rule.of} is used up: send fewer "
            f"requests"
        )
        return errors.OverQuota(
            f"{used}, or ask for a higher quota (`pilotlight quota show`)",
            retry_after_s=self.wait_s,
            quota=self.quota,
            of=rule.of,
            limit=self.limit,
            **({"customer": rule.subject.partition("/")[2]} if rule.of == "customer" else {}),
        )


class Meter:
    """What is left of one subject's quotas. Unlimited quotas are infinite. Owner: the event loop.

    Attributes:
        per_s, depth, requests: rate, size and content of the bucket of requests, as of `at`.
        tokens_per_s, token_depth, tokens: the same of the bucket of language model tokens; the
            content is negative where calls used more than they had reserved.
        concurrent, held, others: the limit of concurrent calls, the calls that run here, and those
            in other activators, as far as known."""

    __slots__ = (
        "__weakref__",
        "at",
        "concurrent",
        "depth",
        "held",
        "others",
        "per_s",
        "quotas",
        "requests",
        "token_depth",
        "tokens",
        "tokens_per_s",
    )

    def __init__(self, quotas: Quotas, now: float) -> None:
        self.at = now
        self.held = 0
        self.others = 0
        self.requests = self.tokens = inf
        self.depth = self.token_depth = inf
        self.set_limits(quotas)

    def __repr__(self) -> str:
        return (
            f"<Meter {self.requests:g}/{self.depth:g} requests, "
            f"{self.held}+{self.others}/{self.concurrent:g} held>"
        )

    def set_limits(self, quotas: Quotas) -> None:
        """Set new limits. Usage so far stays counted; a bucket that is new, or was unlimited, is
        full."""
        self.quotas = quotas
        self.per_s = quotas.requests_per_s or 0.0
        self.depth = quotas.depth if self.per_s else inf
        self.requests = min(self.requests, self.depth) if self.per_s else inf
        per_min = quotas.tokens_per_min or 0
        self.tokens_per_s = per_min / 60
        self.token_depth = float(per_min) if per_min else inf
        self.tokens = min(self.tokens, self.token_depth) if per_min else inf
        self.concurrent = inf if quotas.concurrent is None else float(quotas.concurrent)

    def is_idle(self, now: float) -> bool:
        """Whether the meter equals a new one, so that it need not be kept."""
        elapsed_s = max(0.0, now - self.at)
        return (
            not self.held
            and self.requests + elapsed_s * self.per_s >= self.depth
            and self.tokens + elapsed_s * self.tokens_per_s >= self.token_depth
        )

    def shortfall(self, requests: int, holds: int, tokens: int) -> tuple[str, float, float] | None:
        """Return the unavailable quota with the longest wait: its name, limit and seconds to wait.
        None when everything is available."""
        worst: tuple[str, float, float] | None = None
        if holds and self.held + self.others + holds > self.concurrent:
            worst = "concurrent", self.concurrent, HELD_WAIT_S
        if requests > self.requests + _EPSILON:
            wait_s = (requests - self.requests) / self.per_s
            if worst is None or wait_s > worst[2]:
                worst = "requests_per_s", self.per_s, wait_s
        wanted = min(self.token_depth, tokens)
        if wanted > 0 and wanted > self.tokens + _EPSILON:
            wait_s = (wanted - self.tokens) / self.tokens_per_s
            if worst is None or wait_s > worst[2]:
                worst = "tokens_per_min", self.token_depth, wait_s
        return worst


def acquire(  # noqa: PLR0917 - names cost a fifth of the time that a decision may take
    meters: Sequence[Meter],
    rules: Sequence[Rule],
    now: float,
    requests: int,
    holds: int,
    tokens: int,
) -> Refusal | None:
    """Acquire everything from every meter, or nothing. `rules` belong to the meters, in the same
    order."""
    is_short = False
    for meter in meters:
        elapsed_s = now - meter.at
        meter.at = now
        left = meter.requests
        if elapsed_s > 0:
            left += elapsed_s * meter.per_s
            if left > meter.depth:  # noqa: PLR1730  # `min` takes three times as long
                left = meter.depth
            if meter.tokens_per_s:
                meter.tokens = min(meter.token_depth, meter.tokens + elapsed_s * meter.tokens_per_s)
        held = meter.held + holds
        if (
            requests > left
            or held + meter.others > meter.concurrent
            or (tokens and tokens > meter.tokens)
        ):
            is_short = True  # mostly: `_refusal` decides
        meter.requests, meter.held = left - requests, held
    if is_short:
        _take(meters, -requests, -holds)
        refusal = _refusal(meters, rules, requests, holds, tokens)
        if refusal is not None:
            return refusal
        _take(meters, requests, holds)
    if tokens:
        for meter in meters:
            meter.tokens -= min(tokens, meter.token_depth)
    return None


def _take(meters: Sequence[Meter], requests: int, holds: int) -> None:
    for meter in meters:
        meter.requests -= requests
        meter.held += holds


def _refusal(
    meters: Sequence[Meter], rules: Sequence[Rule], requests: int, holds: int, tokens: int
) -> Refusal | None:
    worst: Refusal | None = None
    for meter, rule in zip(meters, rules, strict=True):
        missing = meter.shortfall(requests, holds, tokens)
        if missing is not None and (worst is None or missing[2] > worst.wait_s):
            worst = Refusal(rule=rule, quota=missing[0], limit=missing[1], wait_s=missing[2])
    return worst


def refund(meters: Sequence[Meter], requests: int, holds: int, tokens: int) -> None:
    """Refund what was acquired: the slot of an ended call, or everything of a call that was not
    made."""
    for meter in meters:
        meter.held = meter.held - holds if meter.held > holds else 0
    if requests or tokens:
        for meter in meters:
            meter.requests = min(meter.depth, meter.requests + requests)
            meter.tokens = min(meter.token_depth, meter.tokens + min(tokens, meter.token_depth))


def settle(meters: Sequence[Meter], reserved: int, used: int) -> None:
    """Refund reserved tokens that were not used, or charge those used beyond. The debt is at most
    one minute's amount."""
    for meter in meters:
        left = meter.tokens + min(reserved, meter.token_depth) - used
        meter.tokens = max(-meter.token_depth, min(meter.token_depth, left))
