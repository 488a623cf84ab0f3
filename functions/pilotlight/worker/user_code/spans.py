"""Spans that a call's own code records, which reach the activator in one response header.

Spans are recorded for every call, because the decision to keep its trace is made at its end: they
are sent for a sampled call, for one that failed, and for one slower than the function's objective.
User code controls them, so everything is limited, and the activator does not trust them.

If user code has loaded OpenTelemetry's API, our span is its current span (a remote parent that is
not recorded), so that its own spans get the right parent; otherwise nothing of it is imported."""

from __future__ import annotations

import base64
import copy
import itertools
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pilotlight.core.tracing.trace_context import (
    TraceParent,
    attempt_span_id,
    child_span_id,
    format_traceparent,
    parse_traceparent,
    trace_id_for_call,
)
from pilotlight.current_call.spans import span
from pilotlight.protocol import HEADER_SPANS

MAX_SPANS = 64
MAX_BYTES = 8192
"""Maximum size of the header's value: header limits of 64 KiB are common, and this header must
never break a response."""
MAX_ATTRIBUTES = 16
MAX_CHARS = 256
_NAME = HEADER_SPANS.encode()
_LINE = _NAME + b": "
_OPENTELEMETRY = "opentelemetry.trace"


class CallSpans:
    """The spans of one call; a `current_call.spans.SpanRecorder`. Created for every call, so
    everything is computed lazily.

    Attributes:
        began_ns: `time.perf_counter_ns()` at the beginning of the call, on Linux the clock of
            `time.monotonic()`.
    """

    _context: TraceParent | None = None
    _numbers: itertools.count[int] | None = None
    _ended: Sequence[span] = ()
    _foreign: Mapping[str, Any] = MappingProxyType({})
    _shared: BatchSpans | None = None

    def __init__(
        self,
        call: str,
        traceparent: bytes | None = None,
        attempt: bytes | None = None,
        *,
        slow_s: float = math.inf,
    ) -> None:
        """`traceparent` and `attempt`: headers of the request. The spans of a call that takes
        longer than `slow_s` are sent even if it is not sampled."""
        self._call = call
        self._traceparent = traceparent
        self._attempt = attempt
        self._slow_s = slow_s
        self.began_ns = time.perf_counter_ns()

    def __repr__(self) -> str:
        return f"<CallSpans {self._call} {len(self._ended)} ended>"

    @property
    def context(self) -> TraceParent:
        """The span that the call runs in: the activator's, of this attempt."""
        if self._context is None:
            given = parse_traceparent(self._traceparent) if self._traceparent is not None else None
            self._context = given or TraceParent(
                trace_id_for_call(self._call),
                attempt_span_id(self._call, _number(self._attempt)),
                False,
            )
        return self._context

    # -- current_call.spans.SpanRecorder, from any thread ------------------------------------------
    def begin(self, begun: span, parent: span | None) -> str:
        """The id of a new span; "" if there are too many."""
        identity = self._next_id()
        vars(self).setdefault("_ended", [])
        if identity and _OPENTELEMETRY in sys.modules:
            vars(self).setdefault("_foreign", {})[identity] = _enter(
                TraceParent(self.context.trace_id, identity, self.context.is_sampled)
            )
        return identity

    def end(self, ended: span) -> None:
        """Record a span that has ended."""
        own = vars(self)  # filled by `begin`
        own["_ended"].append(ended)
        if ended.id in self._foreign:
            _exit(ended.id, own["_foreign"].pop(ended.id))

    def share(self, batch: BatchSpans) -> None:
        """Add the spans that the call's batch recorded."""
        self._shared = batch

    # -- the call ----------------------------------------------------------------------------------
    def make_current(self) -> None:
        """Make the activator's span the current one of this context in OpenTelemetry's API, if user
        code has loaded it."""
        if _OPENTELEMETRY in sys.modules:
            _enter(self.context)

    def line(self, status: int) -> bytes:
        """The header line of a response, with CRLF; empty for a call whose spans are not sent."""
        ms = (time.perf_counter_ns() - self.began_ns) / 1e6
        if (
            status >= 500
            or ms > self._slow_s * 1000
            or (self._traceparent is not None and self.context.is_sampled)
        ):
            return _LINE + self._encoded(ms) + b"\r\n"
        return b""

    def header(self, status: int) -> list[tuple[bytes, bytes]]:
        """The same header in ASGI's format."""
        line = self.line(status)
        return [(_NAME, line[len(_LINE) : -2])] if line else []

    def _next_id(self) -> str:
        numbers = self._numbers or vars(self).setdefault("_numbers", itertools.count(1))
        number = next(numbers)
        return child_span_id(self.context.span_id, number) if number <= MAX_SPANS else ""

    def _encoded(self, ms: float) -> bytes:
        shared = self._shared.as_of(self) if self._shared is not None else []
        ended = sorted([*self._ended, *shared][:MAX_SPANS], key=lambda one: one.began_ns)
        rows = [self._row(one) for one in ended]
        begun = next(self._numbers) - 1 if self._numbers is not None else 0
        dropped = max(0, begun - MAX_SPANS)
        while True:
            body = {"ms": round(ms, 3), "spans": rows, "dropped": dropped}
            text = base64.b64encode(
                json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")
            )
            if len(text) <= MAX_BYTES or not rows:
                return text
            half = len(rows) // 2  # drop the later spans: earlier ones are the parents of others
            dropped += len(rows) - half
            rows = rows[:half]

    def _row(self, one: span) -> list[Any]:
        began_ms = round((one.began_ns - self.began_ns) / 1e6, 3)
        took_ms = round((one.ended_ns - one.began_ns) / 1e6, 3)
        attributes = {
            str(name)[:MAX_CHARS]: _plain(value)
            for name, value in itertools.islice(one.attributes.items(), MAX_ATTRIBUTES)
        }
        return [
            one.id,
            one.parent,
            str(one.name)[:MAX_CHARS],
            began_ms,
            took_ms,
            one.error[:MAX_CHARS],
            attributes,
        ]


class BatchSpans(CallSpans):
    """Spans of a body that runs for several calls: one span for the batch, and below it those of
    the body.

    It runs in the trace of one of the calls, a sampled one if there is any; the others get copies
    of the spans with their own ids."""

    def __init__(self, members: Sequence[CallSpans]) -> None:
        self._leader = next((one for one in members if one.context.is_sampled), members[0])
        super().__init__(self._leader._call, self._leader._traceparent, self._leader._attempt)
        self._batch = span("batch")
        self._batch.id = self._next_id()
        self._batch.began_ns = self.began_ns
        # a span that the leader opens later by itself must have a different number
        self._leader._numbers = self._numbers

    @property
    def outgoing(self) -> str:
        """The traceparent of requests that the body makes."""
        return format_traceparent(
            self.context.trace_id, self._batch.id, is_sampled=self.context.is_sampled
        )

    def finish(self, **attributes: Any) -> None:
        """End the batch's span; the attributes describe the batch."""
        self._batch.ended_ns = time.perf_counter_ns()
        self._batch.set(**attributes)

    def as_of(self, member: CallSpans) -> list[span]:
        """The batch's span and those of the body, with the member's ids."""
        ours = [self._batch, *self._ended[: MAX_SPANS - 1]]
        if member is self._leader:
            return [
                self._batch,
                *(_below(one, one.id, one.parent or self._batch.id) for one in ours[1:]),
            ]
        ids = {one.id: member._next_id() for one in ours}
        parents = {"": ids[self._batch.id], **ids}
        moved = [
            _below(
                one, ids[one.id], "" if one is self._batch else parents.get(one.parent, parents[""])
            )
            for one in ours
        ]
        return [one for one in moved if one.id]


def _below(one: span, identity: str, parent: str) -> span:
    other = copy.copy(one)
    other.id, other.parent = identity, parent
    return other


def _number(attempt: bytes | None) -> int:
    return int(attempt) if attempt is not None and attempt.isdigit() and len(attempt) < 5 else 1


def _plain(value: Any) -> str | int | float | bool:
    """The attribute as a type of OpenTelemetry's. A value whose `__str__` raises becomes its type's
    name."""
    if isinstance(value, bool | str):
        return value[:MAX_CHARS] if isinstance(value, str) else value
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return value
    if isinstance(value, float) and value - value == 0:
        return value
    try:
        return str(value)[:MAX_CHARS]
    except Exception:  # user code's own __str__
        return type(value).__name__


def _enter(parent: TraceParent) -> Any:
    """Make an unrecorded span OpenTelemetry's current one in this context; returns the previous
    context."""
    from opentelemetry import context, trace

    outer = context.get_current()
    remote = trace.SpanContext(
        int(parent.trace_id, 16),
        int(parent.span_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(int(parent.is_sampled)),
    )
    context.attach(trace.set_span_in_context(trace.NonRecordingSpan(remote), outer))
    return outer


def _exit(identity: str, outer: Any) -> None:
    """Restore the previous context, unless another span is current by now (a span may end in
    another context than it began, or early)."""
    from opentelemetry import context, trace

    if trace.get_current_span().get_span_context().span_id == int(identity, 16):
        context.attach(outer)
