"""What is thought of a peer: asked, left alone for a moment, or distrusted. Pure; `now` in
monotonic seconds."""

from __future__ import annotations

import enum
from dataclasses import dataclass

_FIRST_BACKOFF_S = 1.0
_MAX_BACKOFF_S = 60.0
BUSY_BACKOFF_S = 0.25
"""Somebody who says that it is busy answers: the next chunk may go there again soon."""


class PeerFailure(enum.StrEnum):
    """Why a peer gave nothing. ABSENT and BUSY are answers, the others are not."""

    ABSENT = "absent"
    BUSY = "busy"
    UNREACHABLE = "unreachable"
    SLOW = "slow"
    BROKEN = "broken"
    REFUSED = "refused"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerHealth:
    """Failures in a row, until when nobody asks it, and until when it is distrusted (0: not)."""

    failures: int = 0
    backoff_until: float = 0.0
    distrusted_until: float = 0.0

    def is_asked(self, now: float) -> bool:
        """Whether to ask it now."""
        return now >= max(self.backoff_until, self.distrusted_until)

    def is_distrusted(self, now: float) -> bool:
        """Whether it gave wrong bytes a while ago."""
        return now < self.distrusted_until

    def well(self) -> PeerHealth:
        """It gave what was asked for."""
        return PeerHealth(distrusted_until=self.distrusted_until)

    def failed(self, failure: PeerFailure, *, now: float, distrust_s: float) -> PeerHealth:
        """It gave nothing, or something wrong. Rests double with every failure in a row."""
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
            return self  # asked before it began to rest: one silence, however many waited
        rest = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0**self.failures)
        return PeerHealth(
            failures=self.failures + 1,
            backoff_until=now + rest,
            distrusted_until=self.distrusted_until,
        )
