"""Response headers about quotas: `RateLimit-Policy` and `RateLimit`
(draft-ietf-httpapi-ratelimit-headers-10).

For a token bucket `q` is its size, `w` the seconds to fill it, `r` its content, and `t` the seconds
until it is full. Concurrency (`qu="concurrent-requests"`) has no window: `r` is how many more calls
may run."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf

from activator.quotas.rules import Rules
from activator.quotas.token_bucket import Meter
from pilotlight.spec.quotas import Quotas

_REQUESTS, _HELD, _TOKENS = 1, 2, 4
_NEARLY_ONE = 1 - 1e-6
REUSED_S = 0.01
REUSED_SHARE = 1e-3
"""For this long, and for as many calls as are this share of what is left, the same lines are sent:
they are as much off at most. Where fewer than a thousand are left, each call has its own."""
_Reader = tuple[Meter, Quotas, int, float, float, int]
"""A meter, the quotas shown, which of their kinds, the size of the bucket and seconds per request,
the limit of concurrent calls."""


class RateLimitHeaders:
    """Formats both header lines of one set of rules, each ending in CRLF. The policies are
    formatted once, the remaining amounts each time that they may have changed notably."""

    __slots__ = ("_formatted_at", "_lines", "_readers", "_reuses", "_template")

    def __init__(self, rules: Rules, meters: Sequence[Meter]) -> None:
        self._lines = b""
        self._formatted_at, self._reuses = -inf, 0
        policies: list[str] = []
        names: list[str] = []
        self._readers: list[_Reader] = []
        for rule, meter in zip(rules, meters, strict=True):
            if rule.is_shown:
                found = _policies(rule.of, meter)
                policies += [f'"{name}";{policy}' for _, name, policy in found]
                names += [
                    f'"{name}";r=%d' if kind == _HELD else f'"{name}";r=%d;t=%d'
                    for kind, name, _ in found
                ]
                self._readers.append(_reader(meter, sum(kind for kind, _, _ in found)))
        self._template = (
            f"ratelimit-policy: {', '.join(policies)}\r\nratelimit: {', '.join(names)}\r\n".encode()
        )

    def lines(self) -> bytes:
        """The header lines as of the last decision. Empty when nothing may be shown, or when the
        quotas have changed since."""
        if self._reuses and self._readers[0][0].at - self._formatted_at < REUSED_S:
            self._reuses -= 1
            return self._lines
        if not self._readers:
            return b""
        fewest = inf
        numbers: list[float] = []
        for meter, quotas, kinds, depth, each_s, concurrent in self._readers:
            if meter.quotas is not quotas:
                return b""
            if kinds & _REQUESTS:
                left = meter.requests
                numbers += (max(0, left), (depth - left) * each_s + _NEARLY_ONE)
                fewest = min(fewest, left)
            if kinds & _HELD:
                free = max(0, concurrent - meter.held - meter.others)
                numbers.append(free)
                fewest = min(fewest, free)
            if kinds & _TOKENS:
                left = meter.tokens
                numbers += (
                    max(0, left),
                    (meter.token_depth - left) / meter.tokens_per_s + _NEARLY_ONE,
                )
                fewest = 0  # a call may take any number
        self._formatted_at = self._readers[0][0].at
        self._reuses = max(0, int(fewest * REUSED_SHARE))
        self._lines = self._template % tuple(numbers)
        return self._lines


def _reader(meter: Meter, kinds: int) -> _Reader:
    each_s = 1 / meter.per_s if kinds & _REQUESTS else 0.0
    concurrent = int(meter.concurrent) if kinds & _HELD else 0
    return meter, meter.quotas, kinds, meter.depth, each_s, concurrent


def _policies(name: str, meter: Meter) -> list[tuple[int, str, str]]:
    """Kind, name and parameters of each of a meter's policies."""
    found = []
    if meter.per_s:
        found.append(
            (_REQUESTS, name, f"q={int(meter.depth)};w={max(1, ceil(meter.depth / meter.per_s))}")
        )
    if meter.concurrent != inf:
        found.append(
            (_HELD, f"{name}-concurrent", f'q={int(meter.concurrent)};qu="concurrent-requests"')
        )
    if meter.tokens_per_s:
        found.append((_TOKENS, f"{name}-tokens", f'q={int(meter.token_depth)};w=60;qu="tokens"'))
    return found
