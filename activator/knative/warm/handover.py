"""When a revision's own pods take over from promoted ones: a pure function of what one activator
sees each second.

A promoted pod bridges the time until there are pods of the revision's own, which cost nothing from
the pool. They are requested only when the load lasts: promoted pods were busy for at least half of
the last seconds, calls waited all that time, or the first of them has served for a minute. A short
burst ends in the pods in which it began.

Nothing is taken away before its replacement serves: an own pod that is ready is claimed first, and
a promoted pod is drained only where the others suffice. Where `max_instances` leaves no room for
both, an idle promoted pod goes first, and the next call takes the own pod, which waits."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

LONGEST_S = 60.0
"""A revision whose promoted pod was called again after this time has its own pods from then on."""
BUSY_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeObservation:
    """What one activator sees of a revision that has promoted pods.

    Attributes:
        promoted: instances in promoted pods, draining ones left out; `idle`: of these, without a
            call.
        own: instances in the revision's own pods.
        own_free: own pods that are ready, and that no activator has claimed.
        starting: starts in progress.
        needed: instances that the calls in flight and the autoscaler's last decision need.
        room: further instances that the function's `max_instances` allows."""

    promoted: int
    idle: int
    own: int
    own_free: int
    starting: int
    needed: int
    room: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverStep:
    """What to do now. `asks`: own pods to request; `starts`: ready own pods to claim; `drains`:
    promoted pods that get no more calls."""

    asks: int = 0
    starts: int = 0
    drains: int = 0


@dataclass(slots=True)
class BridgeLoad:
    """The load of one revision's promoted pods, second by second.

    `since`: when the first of them was seen; `window`: seconds that are looked at."""

    since: float
    window: int
    _busy: deque[float] = field(default_factory=deque)

    def record(self, share: float) -> None:
        """Record a second: the share of promoted pods that had a call; 1 while calls wait."""
        self._busy.append(share)
        while len(self._busy) > self.window:
            self._busy.popleft()

    def lasts(self, now: float) -> bool:
        """Whether the load lasts, see the module. A window of 0 s: always."""
        if not self.window:
            return True
        is_whole = len(self._busy) >= self.window
        is_long = now - self.since >= LONGEST_S and any(self._busy)
        return is_long or (is_whole and sum(self._busy) >= BUSY_SHARE * len(self._busy))


def decide(seen: BridgeObservation, *, lasts: bool) -> HandoverStep:
    """Decide the next step."""
    surplus = max(0, seen.promoted + seen.own - max(1, seen.needed)) if seen.own else 0
    drains = min(seen.promoted, surplus, seen.own)
    left = seen.promoted - drains
    starts = min(seen.own_free, left, max(0, seen.room)) if not seen.starting else 0
    if lasts and seen.own_free and not starts and not drains and not seen.starting:
        drains = min(seen.idle, seen.own_free)  # no room for both
    asks = max(0, left - seen.own_free - seen.starting) if lasts and not drains else 0
    return HandoverStep(asks=asks, starts=starts, drains=drains)
