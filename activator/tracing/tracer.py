"""Decides which calls' traces are kept, and builds them. Owner: the event loop.

A call that is not kept costs one header lookup and one random number at its beginning, and a
comparison at its end (`benchmarks/tracing.py` measures them); nothing is built for it. Kept traces
go to `keep`, which is bounded.

A flood of calls that request a trace, fail, or are slow, must not become a flood of traces: per
tenant and reason a number per second and a burst are kept (`Sampling`)."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from random import random
from typing import Any, Protocol

from activator.balancing.instance import Reservation
from activator.calls.call import AnsweredCall, Call
from activator.calls.trace_context import (
    ASKED,
    COLD,
    DRAWN,
    ERROR,
    SHADOWED,
    SLOW,
    AttemptRecord,
    Trace,
)
from activator.routing.call_target import CallTarget
from activator.tracing.trace_builder import FinishedCall, Json, document, parse_report, trace_of
from activator.worker_client.connection import WorkerResponse
from pilotlight.core.tracing.trace_context import (
    forwarded_tracestate,
    parse_traceparent,
    root_span_id,
)
from pilotlight.protocol import HEADER_SPANS
from snapshotter.types import StartKind

RATES = {ASKED: 10.0, DRAWN: 10.0, ERROR: 5.0, COLD: 5.0, SLOW: 2.0, SHADOWED: 2.0}
"""Traces per second and tenant: enough to observe the system, at most some kilobytes a second."""
BURST_S = 5.0
"""Unused rate of this long may be used at once."""
MAX_BUCKETS = 16_384
"""Maximum number of buckets, one per tenant and reason. A full bucket needs no state, so all may be
cleared at any time."""


class Sampling:
    """Token buckets by tenant and reason. Owner: the event loop. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str], tuple[float, float]] = {}

    def __repr__(self) -> str:
        return f"<Sampling {len(self._buckets)} buckets>"

    def try_acquire(self, tenant: str, reason: str, now: float) -> bool:
        """Whether one more trace of this tenant may be kept for this reason; if so, count it."""
        rate = RATES[reason]
        full = rate * BURST_S
        if len(self._buckets) >= MAX_BUCKETS:
            self._buckets.clear()
        tokens, at = self._buckets.get((tenant, reason), (full, now))
        tokens = min(full, tokens + (now - at) * rate)
        if tokens < 1:
            self._buckets[tenant, reason] = (tokens, now)
            return False
        self._buckets[tenant, reason] = (tokens - 1, now)
        return True


_SPANS = HEADER_SPANS.encode()


class Exemplifies(Protocol):
    """Attaches exemplars (references to traces) to metrics."""

    def exemplify(
        self, target: CallTarget, *, exec_s: float, queued_s: float, trace_id: str, at: float
    ) -> None:
        """Attach the kept trace of a call with these durations."""


def forget(trace: Json) -> None:
    """Default of `keep`: drop the trace."""


class Tracer:
    """Builds traces.

    Attributes:
        share: of the calls without a trace context, kept by chance."""

    def __init__(
        self,
        *,
        share: float = 0.0,
        keep: Callable[[Json], None] = forget,
        exemplars: Exemplifies | None = None,
        activator: str = "",
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.share = share
        self._keep = keep
        self._exemplars = exemplars
        self._activator = activator
        self._node = socket.gethostname()
        self._clock_ns = clock_ns
        self._sampling = Sampling()
        self.kept: dict[str, int] = {}
        self.passed_over = 0

    def __repr__(self) -> str:
        return f"<Tracer {sum(self.kept.values())} kept, {self.passed_over} over the rate>"

    # -- begin of a call ---------------------------------------------------------------------------
    def begin(self, call: Call, headers: Mapping[bytes, bytes]) -> None:
        """Join the caller's trace, if there is one, and decide whether the trace is kept in any
        case. The fast path does it itself, so that most calls do not come here."""
        if b"traceparent" in headers:
            self.join(call, headers)
        elif random() < self.share:
            self.draw(call)

    def join(self, call: Call, headers: Mapping[bytes, bytes]) -> None:
        """Join the trace of a `traceparent`, and keep it where its caller requests that."""
        parent = parse_traceparent(headers[b"traceparent"])
        if parent is None:  # invalid: begin a new trace, as without the header (§4.3)
            if random() < self.share:
                self.draw(call)
            return
        given = headers.get(b"tracestate")
        trace = call.trace = Trace(
            parent.trace_id, parent.span_id, state=forwarded_tracestate(given) if given else b""
        )
        # unauthenticated callers cannot keep traces
        if (
            parent.is_sampled
            and call.caller.key_id
            and self._try_acquire(call.caller.tenant or call.target.tenant, ASKED)
        ):
            trace.kept_for = ASKED

    def draw(self, call: Call) -> None:
        """Keep the trace of a call that was chosen by chance."""
        if self._try_acquire(call.target.tenant, DRAWN):
            call.trace = Trace(trace_of(call), kept_for=DRAWN)

    def shadow(self, copy: Call, original: Call) -> None:
        """Give the mirrored call `copy` a trace of its own, linked to that of `original` and kept
        if that one is."""
        kept = (
            original.trace is not None
            and original.trace.kept_for
            and self._try_acquire(copy.target.tenant, SHADOWED)
        )
        link = f"{trace_of(original)}-{root_span_id(original.id)}"
        copy.trace = Trace(trace_of(copy), kept_for=SHADOWED if kept else "", link=link)

    # -- end of a call -----------------------------------------------------------------------------
    def answered(
        self, attempt: AnsweredCall, status: int, *, body: bytes | None = None, **more: Any
    ) -> None:
        """Trace a call whose answer, or a part of it, went to the caller. `more`: fields of
        `FinishedCall`. `body` is not traced."""
        self.ended(
            attempt.call,
            attempt.held,
            attempt.answer,
            status=status,
            dispatched_ns=0 if attempt.is_hit else attempt.dispatched_ns,
            ended_ns=attempt.ended_ns,
            cost=attempt.cost,
            **more,
        )

    def ended(
        self,
        call: Call,
        reservation: Reservation | None,
        answer: WorkerResponse | None,
        *,
        status: int,
        dispatched_ns: int,
        ended_ns: int = 0,
        **more: Any,
    ) -> None:
        """Trace a call without an attempt. `ended_ns`: 0 = now."""
        ended_ns = ended_ns or self._clock_ns()
        reason = self._reason(call, status, ended_ns, more.get("first_byte_ms"))
        if (reason == SLOW and more.get("is_submitted")) or (
            call.trace is not None and call.trace.link
        ):
            reason = call.trace.kept_for if call.trace is not None else ""  # no caller waits for it
        if reason and self._is_kept(call, reason):
            last = call.ended_attempt(reservation, dispatched_ns=dispatched_ns, ended_ns=ended_ns)
            report = parse_report(answer.header(_SPANS)) if answer is not None else None
            self._make(call, reason, (*call.past, last), status, ended_ns, reported=report, **more)

    def failed(self, call: Call, error: str, status: int, **more: Any) -> None:
        """Trace a call that no worker answered; `error` is the type of the caller's error."""
        ended_ns = self._clock_ns()
        reason = ERROR if status >= 500 else call.trace.kept_for if call.trace is not None else ""
        if reason and self._is_kept(call, reason):
            past = call.past
            if not past or past[-1].number < call.attempt:
                past = (
                    *past,
                    call.ended_attempt(None, dispatched_ns=0, ended_ns=ended_ns, error=error),
                )
            self._make(call, reason, past, status, ended_ns, error=error, **more)

    @staticmethod
    def _reason(call: Call, status: int, ended_ns: int, first_byte_ms: float | None) -> str:
        if status >= 500:
            return ERROR
        if call.start_kind is not StartKind.WARM:
            return COLD
        target = call.target
        if (
            first_byte_ms > target.slow_first_ms
            if first_byte_ms is not None
            else ended_ns - call.began_ns > target.slow_ms * 1e6
        ):
            return SLOW
        return call.trace.kept_for if call.trace is not None else ""

    def _is_kept(self, call: Call, reason: str) -> bool:
        return (call.trace is not None and bool(call.trace.kept_for)) or self._try_acquire(
            call.target.tenant, reason
        )

    def _try_acquire(self, tenant: str, reason: str) -> bool:
        is_acquired = self._sampling.try_acquire(tenant, reason, self._clock_ns() / 1e9)
        self.passed_over += not is_acquired
        return is_acquired

    def _make(
        self,
        call: Call,
        reason: str,
        attempts: tuple[AttemptRecord, ...],
        status: int,
        ended_ns: int,
        **more: Any,
    ) -> None:
        more.setdefault("route", f"/v1/functions/{call.target.app}/{call.target.function}:invoke")
        trace = document(
            FinishedCall(
                call=call,
                kept_for=reason,
                attempts=attempts,
                status=status,
                ended_ns=ended_ns,
                node=self._node,
                activator=self._activator,
                **more,
            )
        )
        self.kept[reason] = self.kept.get(reason, 0) + 1
        self._keep(trace)
        last = attempts[-1] if attempts else None
        if self._exemplars is not None and last is not None and last.dispatched_ns:
            exec_s = (last.ended_ns - last.dispatched_ns) / 1e9
            self._exemplars.exemplify(
                call.target,
                exec_s=exec_s,
                queued_s=call.queued_ms / 1000,
                trace_id=trace["id"],
                at=trace["at"],
            )
