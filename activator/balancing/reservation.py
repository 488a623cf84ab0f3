"""Reservation of a slot on an instance, which a call holds until it has ended."""

from __future__ import annotations

from typing import Final, Protocol

from activator.balancing.instance import Instance
from activator.resilience.breaker import ANSWERED, Outcome
from snapshotter.types import StartKind
from weight_cache.types import Tier

WARM: Final = StartKind.WARM
"""Module constant for the hot path, as `breaker.ANSWERED`."""
CANCELLED = "cancelled"
"""Outcome of a call whose caller disconnected."""


class SlotOwner(Protocol):
    """Owner of the slot (the Throttler)."""

    def release(self, instance: Instance, ending: Outcome = ANSWERED) -> None:
        """Free the slot; `ending`: outcome of its call for breakers."""
        ...

    def drain(self, instance: Instance) -> None:
        """Give this instance no more calls."""
        ...


class Reservation:
    """A reserved slot. Its holder must `release` it exactly once.

    Attributes:
        start_kind: WARM, or the kind of the start that this call waited for.
        start_ms: the part of the wait that was that start.
        ending: outcome of its call for breakers.
    """

    __slots__ = ("ending", "instance", "start_kind", "start_ms", "throttler")

    def __init__(
        self, throttler: SlotOwner, instance: Instance, start_kind: StartKind, start_ms: float
    ) -> None:
        self.throttler = throttler
        self.instance = instance
        self.start_kind = start_kind
        self.start_ms = start_ms
        self.ending = ANSWERED

    @property
    def weights(self) -> str:
        """The storage tier of the weights of the start that this call waited for, the farthest of
        several; "" for a WARM call."""
        if self.start_kind is WARM:
            return ""
        tiers = set(self.instance.info.weights.values())
        return next((tier.value for tier in Tier if tier.value in tiers), "")

    def release(self) -> None:
        """Release the slot."""
        self.throttler.release(self.instance, self.ending)

    def release_unused(self) -> None:
        """Release a slot on which no call ran: the outcome does not count, and a breaker's probe is
        still pending."""
        self.ending = Outcome.NEITHER
        self.release()
