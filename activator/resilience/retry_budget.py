"""How many retries a caller may cause: a share of its calls, so that what fails is not drowned in
what is tried again.

(Google SRE Book, ch. 22, "Addressing cascading failures": per-client retry budget.) Each call puts
`share` of a token into its caller's bucket, each retry takes one out; BURST are kept at most, and
one trickles in now and then, so that a caller of few calls has some, too. Counted by each activator
for itself."""

from __future__ import annotations

from collections import OrderedDict

BURST = 10.0
"""Tokens kept at most, and at first."""
TRICKLE_PER_S = 0.1
"""Tokens that come without calls."""
MAX_CALLERS = 16_384
"""Callers remembered; the one that came longest ago goes first (and begins again with a full
bucket)."""


class CallerRetryBudget:
    """What one caller did. `calls` is counted up by whoever takes a call in; owner: the event
    loop."""

    __slots__ = ("_at", "_seen", "_share", "_tokens", "calls")

    def __init__(self, share: float, now: float) -> None:
        self._share = share
        self._tokens = BURST
        self._at = now
        self._seen = 0
        self.calls = 0

    def __repr__(self) -> str:
        return f"<CallerRetryBudget {self.calls} calls, {self._tokens:.1f} retries left>"

    def take(self, now: float) -> bool:
        """Take one retry; False when there is none."""
        earned = (self.calls - self._seen) * self._share + max(0.0, now - self._at) * TRICKLE_PER_S
        self._seen, self._at = self.calls, now
        self._tokens = min(BURST, self._tokens + earned)
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class RetryBudgets:
    """The tallies of all callers, by the id of their key. Owner: the event loop."""

    def __init__(self, share: float) -> None:
        """`share`: retries per call, 0 to 1; 0 = nothing is ever tried again on a caller's
        behalf."""
        self._share = share
        self._tallies: OrderedDict[str, CallerRetryBudget] = OrderedDict()

    def __repr__(self) -> str:
        return f"<RetryBudgets {len(self._tallies)} callers, {self._share:g} per call>"

    def of(self, key_id: str, now: float) -> CallerRetryBudget:
        """That of one caller. Whoever keeps it may find it forgotten when very many others came
        since; then it counts for nobody."""
        tally = self._tallies.get(key_id)
        if tally is None:
            tally = self._tallies[key_id] = CallerRetryBudget(self._share, now)
            if len(self._tallies) > MAX_CALLERS:
                self._tallies.popitem(last=False)
        else:
            self._tallies.move_to_end(key_id)
        return tally

    def take(self, key_id: str, now: float) -> bool:
        """Take one retry of this caller's; False when it has none."""
        return self._share > 0 and self.of(key_id, now).take(now)
