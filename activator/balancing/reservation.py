"""A held slot on an instance: what a call owns from the moment it may run until it has ended."""

from __future__ import annotations

import time
from typing import Final, Protocol

from activator.balancing.instance import Instance
from activator.billing.errors import AllowanceNeeded
from activator.billing.instance_meter import OpenRecord
from activator.llm.token_reservation import TokenReservation
from activator.resilience.breaker import ANSWERED, Outcome
from pilotlight.pricing import BUSY
from snapshotter.types import StartKind
from weight_cache.types import Tier

MAX_BORROWINGS = 8
"""A function has a handful of budgets over it, and each may need to be borrowed from; other calls
may take what came in between."""

WARM: Final = StartKind.WARM
"""By a name of its own for the hot path, as `breaker.ANSWERED`."""
_WARM: Final = WARM.value
CANCELLED = "cancelled"
"""Outcome of a call whose caller left."""


class SlotOwner(Protocol):
    """Whose slot it is (the Throttler)."""

    def release(self, instance: Instance, ending: Outcome = ANSWERED) -> None:
        """The slot is free again; `ending`: how its call ended, as far as blame goes."""
        ...

    def drain(self, instance: Instance) -> None:
        """No more calls for this instance."""
        ...


class BillableCall(Protocol):
    """What the books want to know of a call."""

    id: str
    attempt: int
    key_id: str
    method: str
    caller: str
    deadline_s: float | None
    tokens: TokenReservation | None

    @property
    def mark(self) -> str:
        """What its record says that few do (`billing.usage.marked`)."""
        ...

    @property
    def queued_ms(self) -> float:
        """Milliseconds that it waited, without the start."""
        ...

    def remaining_s(self, clock_s: float) -> float:
        """Seconds left of the caller's own deadline, at most `clock_s`."""
        ...


class Reservation:
    """A held slot. Whoever holds it must `release` it exactly once.

    Attributes:
        start_kind: how this call got its instance: WARM, or the rung of the start it waited for.
        start_ms: the part of the wait that was that start.
        ending: how its call ended, as far as blame goes.
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
        """The tier from which the start that this call waited for had its weights, the farthest of
        several; "" for a WARM call."""
        if self.start_kind is WARM:
            return ""
        tiers = set(self.instance.info.weights.values())
        return next((tier.value for tier in Tier if tier.value in tiers), "")

    def open(self, call: BillableCall) -> OpenRecord:
        """Reserve money, write the attempt into the journal and start its meter, before it is
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
        """`open` for the first attempt of a call that waited for nothing and has no deadline of its
        own."""
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
        """`open`, after money was borrowed from what all activators share, where that is needed.
        Raises Unavailable too."""
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
        """Give the slot back."""
        self.throttler.release(self.instance, self.ending)

    def give_back(self) -> None:
        """`release` of a slot on which no call ran: nothing was learnt, and a breaker's probe is
        still to come."""
        self.ending = Outcome.NEITHER
        self.release()
