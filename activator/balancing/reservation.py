"""Reservation of a slot on an instance, which a call holds until it has ended."""

from __future__ import annotations

import time
from typing import Final, Protocol

from activator.balancing.instance import Instance
from activator.billing.errors import AllowanceNeeded
from activator.billing.instance_meter import OpenRecord
from activator.llm.token_reservation import TokenReservation
from activator.resilience.breaker import ANSWERED, Outcome
from pilotlight.spec.pricing import BUSY
from snapshotter.types import StartKind
from weight_cache.types import Tier

MAX_BORROWINGS = 8
"""Most attempts to borrow: a function has a few budgets above it, each may need to be borrowed
from, and other calls may use the borrowed amount first."""

WARM: Final = StartKind.WARM
"""Module constant for the hot path, as `breaker.ANSWERED`."""
_WARM: Final = WARM.value
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


class BillableCall(Protocol):
    """The fields of a call that billing needs."""

    id: str
    attempt: int
    key_id: str
    method: str
    caller: str
    deadline_s: float | None
    tokens: TokenReservation | None

    @property
    def mark(self) -> str:
        """Optional marks of its usage record (`billing.usage.marked`)."""
        ...

    @property
    def queued_ms(self) -> float:
        """Milliseconds in the queue, without the start."""
        ...

    def remaining_s(self, clock_s: float) -> float:
        """Return the seconds left of the caller's own deadline, at most `clock_s`."""
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

    def open(self, call: BillableCall) -> OpenRecord:
        """Reserve budget, write the attempt to the journal and start its meter, before it is
        dispatched.

        Raises JournalFull, OverBudget, BudgetReserved, AllowanceNeeded.
        """
        return self.instance.account.open(
            call=call.id,
            attempt=call.attempt,
            key=call.key_id,
            method=call.method,
            start_kind=self.start_kind.value,
            queued_ms=int(call.queued_ms),
            start_ms=int(self.start_ms),
            now_ns=time.monotonic_ns(),
            at_ns=time.time_ns(),
            caller=call.caller,
            limit_ns=None
            if call.deadline_s is None
            else max(0, int(call.remaining_s(call.deadline_s) * 1e9)),
            mark=call.mark,
            tokens=call.tokens,
        )

    def open_warm(self, call: BillableCall) -> OpenRecord:
        """Run `open` for the first attempt of a call that did not wait and has no own deadline."""
        return self.instance.account.open(
            call=call.id,
            attempt=1,
            key=call.key_id,
            method=call.method,
            start_kind=_WARM,
            queued_ms=0,
            start_ms=0,
            now_ns=time.monotonic_ns(),
            at_ns=time.time_ns(),
            caller=call.caller,
            mark=call.mark,
        )

    async def open_paid(self, call: BillableCall) -> OpenRecord:
        """Run `open`, borrowing from the budget that all activators share where needed. Raises
        Unavailable too."""
        for _ in range(MAX_BORROWINGS):
            try:
                return self.open(call)
            except AllowanceNeeded as e:
                await e.cover.borrow(e.worst)
        return self.open(call)

    def close(
        self, ticket: OpenRecord, *, status: int, outcome: str, bytes_in: int, bytes_out: int
    ) -> str:
        """Stop the meter and write the complete record; returns the cost as text."""
        if outcome in (CANCELLED, BUSY):
            self.ending = Outcome.NEITHER
        return self.instance.account.close(
            ticket,
            status=status,
            outcome=outcome,
            bytes_in=bytes_in,
            bytes_out=bytes_out,
            now_ns=time.monotonic_ns(),
            at_ns=time.time_ns(),
        ).cost

    def release(self) -> None:
        """Release the slot."""
        self.throttler.release(self.instance, self.ending)

    def release_unused(self) -> None:
        """Release a slot on which no call ran: the outcome does not count, and a breaker's probe is
        still pending."""
        self.ending = Outcome.NEITHER
        self.release()
