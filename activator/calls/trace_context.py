"""A call's trace context, and its earlier attempts. Most calls have neither."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pilotlight import errors
from pilotlight.core.tracing.trace_context import (
    attempt_span_id,
    format_traceparent,
    parse_traceparent,
    trace_id_for_call,
)
from snapshotter.types import StartKind

if TYPE_CHECKING:
    from activator.balancing.instance import Instance, Reservation
    from activator.calls.call import AnsweredCall, Call

ASKED, DRAWN, ERROR, COLD, SLOW, SHADOWED = "asked", "drawn", "error", "cold", "slow", "shadow"
"""Why a trace is kept: requested by its caller; by chance; its call failed, waited for a start, or
was slow; it is the copy of a kept one."""

MAX_ATTEMPTS = 32
"""Maximum attempts of one call in its trace."""


class Trace:
    """The trace context of a call.

    Attributes:
        id: 32 hex digits.
        parent: the caller's span, 16 hex digits; "" = the call begins the trace.
        state: `tracestate`, passed on unchanged.
        kept_for: ASKED or DRAWN if the trace will be kept in any case; "" = decided at the end.
        link: `<trace id>-<span id>` of the call that this one mirrors; "" for others."""

    __slots__ = ("id", "kept_for", "link", "parent", "state")

    def __init__(
        self, id: str, parent: str = "", *, state: bytes = b"", kept_for: str = "", link: str = ""
    ) -> None:
        self.id = id
        self.parent = parent
        self.state = state
        self.kept_for = kept_for
        self.link = link

    def to_json(self) -> list[str]:
        """The representation in a journal."""
        return [self.id, self.parent, self.state.decode("latin-1"), self.kept_for]

    @classmethod
    def from_json(cls, body: Sequence[str]) -> Trace:
        """Parse the result of `to_json`."""
        identity, parent, state, kept_for = body
        return cls(identity, parent, state=state.encode("latin-1"), kept_for=kept_for)

    def __repr__(self) -> str:
        return f"<Trace {self.id} {self.kept_for or 'undecided'}>"

    def lines(self, call_id: str, attempt: int, *, is_sampled: bool) -> bytes:
        """Header lines for the worker, each *beginning* with CRLF."""
        span = attempt_span_id(call_id, attempt)
        line = (
            b"\r\ntraceparent: " + format_traceparent(self.id, span, is_sampled=is_sampled).encode()
        )
        return line + b"\r\ntracestate: " + self.state if self.state else line


class AttemptRecord(NamedTuple):
    """One attempt of a call. Times are monotonic nanoseconds.

    Attributes:
        number: from 1.
        waited_ns: begin of the wait for its slot.
        reserved_ns: when it got a slot; 0 = never.
        start_ms: the part of the wait that was a start.
        instance: the instance of its slot; None = it had none.
        dispatched_ns: when it was sent to the worker; 0 = never.
        error: type of the error that ended it; "" = it was answered."""

    number: int
    waited_ns: int
    reserved_ns: int
    start_ms: float
    instance: Instance | None
    dispatched_ns: int
    ended_ns: int
    error: str = ""


def worker_lines(call: Call) -> bytes:
    """Trace header lines for a worker, each *beginning* with CRLF. Empty if the worker can derive
    the trace from the call's id.

    The trace of a call that waited for a start is kept, so its spans are requested."""
    trace, waited = call.trace, call.start_kind is not StartKind.WARM
    if trace is None:
        if call.attempt == 1 and not waited:
            return b""
        trace = Trace(trace_id_for_call(call.id))
    return trace.lines(call.id, call.attempt, is_sampled=waited or bool(trace.kept_for))


def traceparent_of(call: Call, given: bytes | None) -> bytes:
    """`traceparent` of a call that the function running `call` makes: the span in which it makes
    it if `given` names one of the call's trace, else the call's own."""
    trace = call.trace or Trace(trace_id_for_call(call.id))
    parent = parse_traceparent(given) if given is not None else None
    span = (
        parent.span_id
        if parent is not None and parent.trace_id == trace.id
        else attempt_span_id(call.id, call.attempt)
    )
    return format_traceparent(trace.id, span, is_sampled=bool(trace.kept_for)).encode()


def kind_of(error: BaseException) -> str:
    """The value of `error.type`: the problem's type for our own errors."""
    if isinstance(error, errors.PilotlightError):
        return error.type
    return {"CancelledError": "cancelled", "WorkerConnectionLost": "worker-gone"}.get(
        type(error).__name__, type(error).__qualname__
    )


def note(
    call: Call, reservation: Reservation | None, *, dispatched_ns: int, ended_ns: int, error: str
) -> None:
    """Record an attempt that ended without an answer, for the call's trace."""
    if len(call.past) < MAX_ATTEMPTS:
        call.past = (
            *call.past,
            attempt_of(
                call, reservation, dispatched_ns=dispatched_ns, ended_ns=ended_ns, error=error
            ),
        )


def note_answer(attempt: AnsweredCall, error: str) -> None:
    """Record an attempt that was answered and closed, and is retried nevertheless."""
    ended_ns = attempt.dispatched_ns + int(attempt.exec_ms * 1e6)
    note(
        attempt.call,
        attempt.held,
        dispatched_ns=attempt.dispatched_ns,
        ended_ns=ended_ns,
        error=error,
    )


def attempt_of(
    call: Call,
    reservation: Reservation | None,
    *,
    dispatched_ns: int,
    ended_ns: int,
    error: str = "",
) -> AttemptRecord:
    """The attempt that ends now."""
    past = call.past
    return AttemptRecord(
        number=call.attempt,
        waited_ns=past[-1].ended_ns if past else call.received_ns,
        reserved_ns=call.reserved_ns if reservation is not None else 0,
        start_ms=reservation.start_ms if reservation is not None else 0.0,
        instance=reservation.instance if reservation is not None else None,
        dispatched_ns=dispatched_ns,
        ended_ns=ended_ns,
        error=error,
    )
