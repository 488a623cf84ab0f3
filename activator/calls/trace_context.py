"""A call's trace context, and the records of its earlier attempts. Most calls have neither."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from activator.balancing.instance import Instance
from pilotlight import errors
from pilotlight.core.tracing.trace_context import attempt_span_id, format_traceparent

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


def kind_of(error: BaseException) -> str:
    """The value of `error.type`: the problem's type for our own errors."""
    if isinstance(error, errors.PilotlightError):
        return error.type
    return {"CancelledError": "cancelled", "WorkerConnectionLost": "worker-gone"}.get(
        type(error).__name__, type(error).__qualname__
    )
