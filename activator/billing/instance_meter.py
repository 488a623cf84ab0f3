"""Processor sharing: while k calls run on an instance, each is charged 1/k of its time.

A virtual clock runs at 1/k of the real one. The charge of a call is the advance of the virtual
clock between its begin and its end. It is kept in whole nanoseconds; the remainder of a division by
k is carried to the next event, and with one call left nothing remains. So the charges of an
instance's calls add up to its busy time exactly, however they overlap, and an event costs the same
with 1 or 10,000 calls.

Idle time counts beyond the free `free_ns` of each pause (IDLE), or from its first moment while
`min_instances` reserves the instance (RESERVED). Where the instance has a GPU (`counts_all`), the
rest of its time counts too: the free part of each pause (FREE), and its suspension (ASLEEP). Then
the charges of its calls and all idle time add up to the life of the meter.

Source of the virtual clock: Parekh and Gallager, "A generalized processor sharing approach to flow
control", 1993."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pilotlight.errors import Conflict
from pilotlight.spec import pricing


class IdleKind(enum.StrEnum):
    """IDLE: idle beyond the free window. RESERVED: idle because min_instances reserves the
    instance. FREE: idle within the free window, or stopping. ASLEEP: suspended."""

    IDLE = "IDLE"
    RESERVED = "RESERVED"
    FREE = pricing.FREE_IDLE
    ASLEEP = pricing.ASLEEP


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleSpan:
    """Unrecorded idle time of one kind. It began at `started_ns` on the meter's clock and may have
    been interrupted."""

    kind: IdleKind
    started_ns: int
    billed_ns: int


class InstanceMeter:
    """The meter of one instance. Times are monotonic nanoseconds; a clock that steps back counts as
    stopped.

    Owned by the activator that leases the instance; every method is synchronous, so no lock is
    needed."""

    __slots__ = (
        "_billed_to",
        "_busy_ns",
        "_carry",
        "_counts_all",
        "_free_ns",
        "_idle_from",
        "_is_reserved",
        "_is_serving",
        "_last",
        "_open",
        "_out_of_service",
        "_spans",
        "_virtual",
    )

    def __init__(
        self,
        started_ns: int,
        *,
        free_ns: int = 0,
        is_reserved: bool = False,
        counts_all: bool = False,
    ) -> None:
        self._virtual = 0
        self._carry = 0
        self._last = started_ns
        self._busy_ns = 0
        self._open: dict[str, int] = {}
        self._free_ns = free_ns
        self._is_reserved = is_reserved
        self._counts_all = counts_all
        self._is_serving = True
        self._out_of_service: IdleKind | None = None
        self._idle_from = started_ns
        self._billed_to = started_ns
        self._spans: dict[IdleKind, tuple[int, int]] = {}

    def __repr__(self) -> str:
        return (
            f"<InstanceMeter {len(self._open)} calls, busy {self._busy_ns / 1e9:.3f} "
            f"s{', reserved' if self._is_reserved else ''}>"
        )

    @property
    def in_flight(self) -> int:
        """Number of running calls."""
        return len(self._open)

    @property
    def is_serving(self) -> bool:
        """Whether the instance takes calls."""
        return self._is_serving

    @property
    def busy_ns(self) -> int:
        """Time with at least one running call, up to the last event."""
        return self._busy_ns

    def begin(self, call_id: str, now_ns: int) -> int:
        """Begin a call and return the virtual clock. Raises Conflict when it has begun already."""
        calls = self._open
        if call_id in calls:
            raise Conflict(
                f"call {call_id} is already being metered: call ids must be unique", call=call_id
            )
        if calls:
            self._advance(now_ns, len(calls))
        else:
            self._cut_idle(now_ns)
            if now_ns > self._last:
                self._last = now_ns
        calls[call_id] = self._virtual
        return self._virtual

    def end(self, call_id: str, now_ns: int) -> int:
        """End a call and return the nanoseconds to charge. Raises KeyError when it has not
        begun."""
        calls = self._open
        sharers = len(calls)
        started = calls.pop(call_id)
        self._advance(now_ns, sharers)
        if not calls:
            self._idle_from = self._billed_to = self._last
        return self._virtual - started

    @property
    def virtual_at_last_ns(self) -> int:
        """The virtual clock at the last event."""
        return self._virtual

    def virtual_ns(self, now_ns: int) -> int:
        """The virtual clock at `now_ns`. It stops while the instance is idle."""
        if self._open:
            self._advance(now_ns, len(self._open))
        return self._virtual

    def reserve(self, now_ns: int, *, is_reserved: bool) -> None:
        """Set whether min_instances reserves the instance, from `now_ns` on."""
        if is_reserved != self._is_reserved:
            if not self._open:
                self._cut_idle(now_ns)
            self._is_reserved = is_reserved

    def end_service(self, now_ns: int, kind: IdleKind | None) -> None:
        """From `now_ns` on the instance takes no calls and is not paid for: its time is of this
        kind (ASLEEP, FREE); None = it does not count, as it has ended or is being resumed. May be
        called again, with another kind."""
        if not self._open:
            self._cut_idle(now_ns)
        self._is_serving = False
        self._out_of_service = kind

    def consume_idle(self, now_ns: int) -> list[IdleSpan]:
        """Return the idle time up to `now_ns` that was not returned before, one span per kind. A
        pause in progress is split here."""
        if not self._open:
            self._cut_idle(now_ns)
        spans, self._spans = self._spans, {}
        return [
            IdleSpan(kind=kind, started_ns=started, billed_ns=billed)
            for kind, (started, billed) in spans.items()
        ]

    def _advance(self, now_ns: int, sharers: int) -> None:
        elapsed = now_ns - self._last
        if elapsed > 0:
            self._last = now_ns
            self._busy_ns += elapsed
        else:
            elapsed = 0
        share, self._carry = divmod(elapsed + self._carry, sharers)
        self._virtual += share

    def _cut_idle(self, now_ns: int) -> None:
        counted_to = self._billed_to
        if now_ns <= counted_to:
            return
        self._billed_to = now_ns
        if not self._is_serving:
            if self._counts_all and self._out_of_service is not None:
                self._add_idle(self._out_of_service, counted_to, now_ns)
            return
        free_until = self._idle_from if self._is_reserved else self._idle_from + self._free_ns
        started = free_until if free_until > counted_to else counted_to
        if now_ns > started:
            kind = IdleKind.RESERVED if self._is_reserved else IdleKind.IDLE
            self._add_idle(kind, started, now_ns)
        if self._counts_all and started > counted_to:
            self._add_idle(IdleKind.FREE, counted_to, min(started, now_ns))

    def _add_idle(self, kind: IdleKind, started_ns: int, ended_ns: int) -> None:
        first, counted = self._spans.get(kind, (started_ns, 0))
        self._spans[kind] = (first, counted + ended_ns - started_ns)
