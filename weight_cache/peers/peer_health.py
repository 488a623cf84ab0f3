"""Health of a peer: available, backing off, or distrusted. Pure; `now` in monotonic seconds."""

from __future__ import annotations

import enum
from dataclasses import dataclass

_FIRST_BACKOFF_S = 1.0
_MAX_BACKOFF_S = 60.0
BUSY_BACKOFF_S = 0.25
"""A busy peer works: the next chunk may be requested from it soon."""


class PeerFailure(enum.StrEnum):
    """Why a peer did not deliver. ABSENT and BUSY are valid answers, the others are failures."""

    ABSENT = "absent"
    BUSY = "busy"
    UNREACHABLE = "unreachable"
    SLOW = "slow"
    BROKEN = "broken"
    REFUSED = "refused"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerHealth:
    """Consecutive failures, end of the back-off, and end of the distrust (0: none)."""

    failures: int = 0
    backoff_until: float = 0.0
    distrusted_until: float = 0.0

    def is_asked(self, now: float) -> bool:
        """Whether the peer may be asked now."""
        return now >= max(self.backoff_until, self.distrusted_until)

    def is_distrusted(self, now: float) -> bool:
        """Whether the peer sent corrupt bytes recently."""
        return now < self.distrusted_until

    def well(self) -> PeerHealth:
        """The health after a success."""
        return PeerHealth(distrusted_until=self.distrusted_until)

    def failed(self, failure: PeerFailure, *, now: float, distrust_s: float) -> PeerHealth:
        """The health after a failure. The back-off doubles with each consecutive failure."""
        if failure is PeerFailure.ABSENT:
            return self
        if failure is PeerFailure.WRONG:
            return PeerHealth(
                failures=self.failures,
                backoff_until=self.backoff_until,
                distrusted_until=now + distrust_s,
            )
        if failure is PeerFailure.BUSY:
            return PeerHealth(
                failures=self.failures,
                backoff_until=now + BUSY_BACKOFF_S,
                distrusted_until=self.distrusted_until,
            )
        if now < self.backoff_until:
            return self  # sent before the back-off began: count concurrent timeouts once
        rest = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0**self.failures)
        return PeerHealth(
            failures=self.failures + 1,
            backoff_until=now + rest,
            distrusted_until=self.distrusted_until,
        )
