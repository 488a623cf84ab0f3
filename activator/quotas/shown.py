"""What callers are told of their quotas: `RateLimit-Policy` and `RateLimit` (draft-ietf-httpapi-ratelimit-headers-10).

Of a token bucket `q` is its depth, `w` the seconds in which it fills, `r` what is in it, and `t` the seconds until it is full again. Of
calls at once (`qu="concurrent-requests"`) there is no window: `r` is how many more may run.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf

from activator.quotas.decision import Meter
from activator.quotas.rules import Rules


class Shown:
    """Formats both header lines of one set of rules, each ending in CRLF: the policies once, what is left each time."""

    __slots__ = ("_policy", "_readers", "_template")

    def __init__(self, rules: Rules, meters: Sequence[Meter]) -> None:
        policies: list[str] = []
        names: list[str] = []
        self._readers: list[tuple[Meter, str]] = []
        for rule, meter in zip(rules, meters, strict=True):
            if rule.is_shown:
                for kind, name, policy in _policies(rule.of, meter):
                    policies.append(f'"{name}";{policy}')
                    names.append(f'"{name}";r=%d' if kind == "held" else f'"{name}";r=%d;t=%d')
                    self._readers.append((meter, kind))
        self._policy = b"ratelimit-policy: %b\r\nratelimit: " % ", ".join(policies).encode()
        self._template = ", ".join(names).encode() + b"\r\n"

    def lines(self) -> bytes:
        """As of the last decision; empty where nothing may be shown."""
        if not self._readers:
            return b""
        numbers: list[float] = []
        for meter, kind in self._readers:
            if kind == "requests":
                left = meter.requests
                numbers += (max(0, left), ceil((meter.depth - left) / meter.per_s))
            elif kind == "held":
                numbers.append(max(0, meter.concurrent - meter.held - meter.others))
            else:
                numbers += (max(0, meter.tokens), ceil((meter.token_depth - meter.tokens) / meter.tokens_per_s))
        return self._policy + self._template % tuple(numbers)


def _policies(name: str, meter: Meter) -> list[tuple[str, str, str]]:
    """Kind, name and parameters of each of a meter's policies."""
    found = []
    if meter.per_s:
        found.append(("requests", name, f"q={int(meter.depth)};w={max(1, ceil(meter.depth / meter.per_s))}"))
    if meter.concurrent != inf:
        found.append(("held", f"{name}-concurrent", f'q={int(meter.concurrent)};qu="concurrent-requests"'))
    if meter.tokens_per_s:
        found.append(("tokens", f"{name}-tokens", f'q={int(meter.token_depth)};w=60;qu="tokens"'))
    return found
