"""What is thought of a peer: asked, left alone for a moment, or distrusted. Pure; `now` in
monotonic seconds."""

from __future__ import annotations

import enum
from dataclasses import dataclass

_FIRST_REST_S = 1.0
_LONGEST_REST_S = 60.0
BUSY_REST_S = 0.25
"""Somebody who says that it is busy answers: the next chunk may go there again soon."""


class Failure(enum.StrEnum):
    """Why a peer gave nothing. ABSENT and BUSY are answers, the others are not."""

    ABSENT = "absent"
    BUSY = "busy"
    UNREACHABLE = "unreachable"
    SLOW = "slow"
    BROKEN = "broken"
    REFUSED = "refused"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Failures in a row, until when nobody asks it, and until when it is distrusted (0: not)."""

    failures: int = 0
    rests_until: float = 0.0
    distrusted_until: float = 0.0

    def is_asked(self, now: float) -> bool:
        """Whether to ask it now."""
        return now >= max(self.rests_until, self.distrusted_until)

    def is_distrusted(self, now: float) -> bool:
        """Whether it gave wrong bytes a while ago."""
        return now < self.distrusted_until

    def well(self) -> Standing:
        """It gave what was asked for."""
        return Standing(distrusted_until=self.distrusted_until)

    def failed(self, failure: Failure, *, now: float, distrust_s: float) -> Standing:
        """It gave nothing, or something wrong. Rests double with every failure in a row."""
        if failure is Failure.ABSENT:
            return self
        if failure is Failure.WRONG:
            return Standing(
                failures=self.failures,
                rests_until=self.rests_until,
                distrusted_until=now + distrust_s,
            )
        if failure is Failure.BUSY:
            return Standing(
                failures=self.failures,
                rests_until=now + BUSY_REST_S,
                distrusted_until=self.distrusted_until,
            )
        if now < self.rests_until:
            return self  # asked before it began to rest: one silence, however many waited
        rest = min(_LONGEST_REST_S, _FIRST_REST_S * 2.0**self.failures)
        return Standing(
            failures=self.failures + 1,
            rests_until=now + rest,
            distrusted_until=self.distrusted_until,
        )
