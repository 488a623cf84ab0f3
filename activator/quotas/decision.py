"""Whether a call may go on: token buckets (Turner 1986) for rates, counts for what runs at once.
Pure; `now` in seconds of one clock.

A call asks for so many requests, holds and tokens of *every* meter that it falls under, and gets
all of it or nothing (more tokens than a minute's worth are a minute's worth). What it did not get
is a `Refusal` of the meter on which it would have to wait longest. A clock that steps back adds
nothing and takes nothing away. `scripts` has the same in Lua, and the contract tests hold both to
the same answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from activator.quotas.rules import Rule
from pilotlight import errors
from pilotlight.quotas import Quotas

HELD_WAIT_S = 1.0
"""When a call that found too many at once should come back: nobody knows when one of them ends."""
_EPSILON = 1e-9
"""Of a token: what floating point loses on the way must not cost a caller that waited exactly as
long as it was told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a call may not go on.

    Attributes:
        quota: the name in `Quotas`.
        limit: its value.
        wait_s: seconds until it may be tried again.
    """

    rule: Rule
    quota: str
    limit: float
    wait_s: float

    def error(self) -> errors.OverQuota:
        """As it is answered."""
        rule = self.rule
        if rule.of == "streams":
            return errors.OverQuota(
                f"this tenant already has {self.limit:g} calls of this function, the bound "
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
        return errors.OverQuota(
            f"quota {self.quota} = {self.limit:g} of this {rule.of} is used up: slow down, or "
            f"have it raised (`pilotlight quota show`)",
            retry_after_s=self.wait_s,
            quota=self.quota,
            of=rule.of,
            limit=self.limit,
        )


class Meter:
    """What is left of one subject's quotas. What has no bound is infinite. Owner: the event loop.

    Attributes:
        per_s, depth, requests: of the bucket of requests; `requests` are in it, as of `at`.
        tokens_per_s, token_depth, tokens: of the bucket of a language model's tokens; below 0 where
        calls used more than they had reserved. concurrent, held, others: calls at once: the bound,
        those held here, and those that other activators hold, as far as known.
    """

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
        self.limit(quotas)

    def __repr__(self) -> str:
        return (
            f"<Meter {self.requests:g}/{self.depth:g} requests, "
            f"{self.held}+{self.others}/{self.concurrent:g} held>"
        )

    def limit(self, quotas: Quotas) -> None:
        """Bounds from now on. What was used stays used; a bucket that is new, or was unbounded, is
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
        """Whether a new meter would say the same: then this one need not be remembered."""
        elapsed_s = max(0.0, now - self.at)
        return (
            not self.held
            and self.requests + elapsed_s * self.per_s >= self.depth
            and self.tokens + elapsed_s * self.tokens_per_s >= self.token_depth
        )

    def lack(self, requests: int, holds: int, tokens: int) -> tuple[str, float, float] | None:
        """Quota, limit and seconds to wait for what is not there now, the longest wait first; None
        when all of it is."""
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


def take(  # noqa: PLR0917 - names cost a fifth of the time that a decision may take
    meters: Sequence[Meter],
    rules: Sequence[Rule],
    now: float,
    requests: int,
    holds: int,
    tokens: int,
) -> Refusal | None:
    """Take all of it from every meter, or nothing from any. `rules` are the meters' own, in the
    same order."""
    is_short = False
    for meter in meters:
        elapsed_s = now - meter.at
        meter.at = now
        left = meter.requests
        if elapsed_s > 0:
            left += elapsed_s * meter.per_s
            left = min(left, meter.depth)
            meter.requests = left
            if meter.tokens_per_s:
                meter.tokens = min(meter.token_depth, meter.tokens + elapsed_s * meter.tokens_per_s)
        if (
            requests > left
            or (holds and meter.held + meter.others + holds > meter.concurrent)
            or tokens > meter.tokens
        ):
            is_short = True
    if is_short and (refusal := _refusal(meters, rules, requests, holds, tokens)) is not None:
        return refusal
    for meter in meters:
        meter.requests -= requests
        meter.held += holds
        if tokens:
            meter.tokens -= min(tokens, meter.token_depth)
    return None


def _refusal(
    meters: Sequence[Meter], rules: Sequence[Rule], requests: int, holds: int, tokens: int
) -> Refusal | None:
    worst: Refusal | None = None
    for meter, rule in zip(meters, rules, strict=True):
        lack = meter.lack(requests, holds, tokens)
        if lack is not None and (worst is None or lack[2] > worst.wait_s):
            worst = Refusal(rule=rule, quota=lack[0], limit=lack[1], wait_s=lack[2])
    return worst


def give_back(meters: Sequence[Meter], requests: int, holds: int, tokens: int) -> None:
    """Put back what was taken: the hold of a call that ended, or all of one that was not made after
    all."""
    for meter in meters:
        meter.held = meter.held - holds if meter.held > holds else 0
    if requests or tokens:
        for meter in meters:
            meter.requests = min(meter.depth, meter.requests + requests)
            meter.tokens = min(meter.token_depth, meter.tokens + min(tokens, meter.token_depth))


def settle(meters: Sequence[Meter], reserved: int, used: int) -> None:
    """Put back the tokens that were reserved and not used, or take those used beyond; what is owed
    is at most one minute's worth."""
    for meter in meters:
        left = meter.tokens + min(reserved, meter.token_depth) - used
        meter.tokens = max(-meter.token_depth, min(meter.token_depth, left))
