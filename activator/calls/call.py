"""A call: one invocation of a function, from its admission to its end."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, Protocol

from activator.balancing.instance import WARM, Instance, Reservation
from activator.billing.usage_pricing import encode_optional_fields
from activator.calls.caller import Caller
from activator.calls.trace_context import MAX_ATTEMPTS, AttemptRecord, Trace
from activator.fairness.queue_priority import QueuePriority
from activator.http.payloads import PICKLE, TRUSTED_LINE, Payload, not_accepted
from activator.quotas.admission import UNCOUNTED, Admission
from activator.quotas.token_reservation import TokenReservation
from activator.resilience.breaker import Outcome
from activator.routing.route_table import CallTarget
from activator.routing.traffic_split import RoutingDecision
from activator.worker_client.connection import WorkerResponse
from pilotlight import errors
from pilotlight.core.tracing.trace_context import (
    attempt_span_id,
    format_traceparent,
    parse_traceparent,
    trace_id_for_call,
)
from pilotlight.spec.identifiers import Priority
from pilotlight.spec.observations import REPLAY_ARM
from pilotlight.spec.pricing import CACHED
from pilotlight.spec.sandboxes import QUEUE_S
from snapshotter.types import StartKind


class ResponseFilter(Protocol):
    """Translates one response on its way to a caller. It does not end the attempt
    (`calls.attempt_end`)."""

    @property
    def is_inside(self) -> bool:
        """Whether only a part of an event was returned so far."""

    def feed(self, data: bytes, now_ns: int) -> bytes:
        """Return the part of these bytes that goes to the caller; of a stream, whole events."""

    def end(self, status: int) -> tuple[int, bytes]:
        """Return status and last bytes of a stream that its worker ended with `status`.

        Raises WorkerConnectionLost for an incomplete one.
        """

    def collected(self, status: int, body: bytes) -> tuple[int, bytes]:
        """Return status and body of a complete, collected response; `body` is the output of `feed`.

        Raises WorkerConnectionLost for an incomplete one.
        """


class Call:
    """One invocation, once its request was read. `now` values are monotonic seconds, `*_ns`
    monotonic nanoseconds.

    Attributes:
        body, content_type, accept: of its payload; the body changes with the target, and leaves
            memory while the call is parked.
        admission: its holdings of quotas until its end.
        choice: why `target` answers it; None = it is the only one, and needs no explanation.
        extra_headers: header lines for the worker.
        at_ns: when it was admitted: wall clock.
        began_ns, routed_ns: when its request arrived, and when it was routed; without the upload
            time of its body.
        received_ns: when it was admitted.
        attempt: number of the attempt, from 1, among those that took a slot.
        retries: number of attempts by the function's own retry policy.
        is_repeated: whether the platform has repeated an attempt whose worker was lost.
        trace: its position in a trace; None = an own, unrequested trace.
        past: earlier attempts.
        degraded: the variant or fallback that answers, for `pilotlight-degraded`; "" for the
            requested target.
        asked: the requested target, where `target` is a variant or a fallback; else None.
        tokens: a language model's tokens, as far as they are known; None for other functions.
        affinity: hash of the prompt's beginning, which routes similar calls to one instance; None =
            none.
        cache_result: what its function's response cache did: `hit`, `miss` or `bypass`, for
            `pilotlight-cache`; "" where it has none. `cache_age_s`: age of the answer of a hit.
        on_open: called with the instance of each attempt, once its record is open; None = no one
            waits for it.
    """

    attempt = 1
    retries = 0
    is_repeated = False
    trace: Trace | None = None
    past: tuple[AttemptRecord, ...] = ()
    degraded = ""
    asked: CallTarget | None = None
    reserved_ns = 0
    start_kind: StartKind = WARM
    start_ms = 0.0
    weights = ""
    tokens: TokenReservation | None = None
    affinity: int | None = None
    cache_result = ""
    cache_age_s = 0
    on_open: Callable[[Instance], None] | None = None

    def __init__(
        self,
        *,
        id: str,
        target: CallTarget,
        method: str,
        payload: Payload,
        caller: Caller,
        admission: Admission = UNCOUNTED,
        choice: RoutingDecision | None = None,
        deadline_s: float | None = None,
    ) -> None:
        """`deadline_s`: the caller's own deadline, in seconds from now; None = it has none."""
        self.id = id
        self.target = target
        self.method = method
        self.body, self.content_type, self.accept = payload
        self.caller = caller
        self.admission = admission
        self.choice = choice
        self.extra_headers = choice.line if choice is not None else b""
        self.deadline_s = deadline_s
        self.began_ns = self.routed_ns = self.received_ns = time.monotonic_ns()
        self.at_ns = time.time_ns()

    def __repr__(self) -> str:
        return f"<Call {self.id} {self.target!r} attempt {self.attempt}>"

    @property
    def started_at(self) -> float:
        """When it was admitted: wall clock, seconds."""
        return self.at_ns / 1e9

    @property
    def mark(self) -> str:
        """Optional marks of its usage records (`usage_pricing.encode_optional_fields`): its arm,
        the variant or fallback that answered, the attempt that made it, and its customer."""
        mark = self.choice.mark if self.choice is not None else ""
        if self.degraded or self.tokens is not None:
            mark += encode_optional_fields(degraded=self.degradation)
        if self.caller.origin is not None:
            mark += encode_optional_fields(parent=self.caller.origin.record)
        if self.caller.customer:
            mark += encode_optional_fields(customer=self.caller.customer)
        return mark

    @property
    def degradation(self) -> str:
        """The value of `pilotlight-degraded`: the variant or fallback that answers, and how its
        response is shortened; "" for neither."""
        cut = self.tokens.degraded if self.tokens is not None else ""
        return f"{self.degraded}, {cut}" if self.degraded and cut else self.degraded or cut

    def reserved(self, reservation: Reservation) -> None:
        """It got a slot, perhaps after another start than for its earlier attempts."""
        if self.target.spec.sandbox and not self.reserved_ns and self.deadline_s is not None:
            # what it may live: its code may have stopped its worker, which ends it otherwise
            waited_s = (time.monotonic_ns() - self.received_ns) / 1e9
            self.deadline_s = min(self.deadline_s, waited_s + max(0.0, self.deadline_s - QUEUE_S))
        self.reserved_ns = time.monotonic_ns()
        if reservation.start_kind is not WARM:
            self.start_kind = reservation.start_kind
            self.start_ms += reservation.start_ms
            self.weights = reservation.weights

    @property
    def queued_ms(self) -> float:
        """Milliseconds from arrival to a slot, without the start it waited for."""
        return max(0.0, (self.reserved_ns - self.received_ns) / 1e6 - self.start_ms)

    def remaining_s(self, clock_s: float) -> float:
        """Return the seconds left of the caller's own deadline, at most `clock_s`."""
        if self.deadline_s is None:
            return clock_s
        return min(clock_s, self.deadline_s - (time.monotonic_ns() - self.received_ns) / 1e9)

    @property
    def is_replay(self) -> bool:
        """Whether it repeats a logged call (`pilotlight replay`): its revision alone answers it."""
        return self.choice is not None and self.choice.arm == REPLAY_ARM

    @property
    def blame(self) -> Outcome:
        """The outcome for the revision when this call is interrupted: neutral where its caller's
        own deadline expired."""
        return Outcome.NEITHER if self.remaining_s(1.0) <= 0 else Outcome.FAILED

    def stand_in(self, target: CallTarget, degraded: str) -> Call:
        """Return a copy of the call for another target, which `degraded` names; it keeps the
        requested target and its clocks.

        Raises InvalidInput for a function that cannot answer it, such as an engine's path for a
        function that is not an engine; UnsupportedMediaType for a pickle where that function is
        another tenant's."""
        if self.content_type is PICKLE and target.tenant != self.target.tenant:
            raise not_accepted()
        other = copy.copy(self)
        other.target = target
        other.degraded = degraded
        if target is not self.target:
            other.body = self.body_for(target)
            other.asked = self.asked or self.target
            # an arm is a revision of the requested function: records of another one must not have
            # it
            other.choice = None
        return other

    def body_for(self, target: CallTarget) -> bytes:
        """Return its body for another function. Raises InvalidInput for one with another kind of
        body."""
        if target.spec.language_model is not None:
            raise errors.InvalidInput(
                f"{target.app}/{target.function} is a language model, and takes no arguments"
            )
        return self.body

    @property
    def start_name(self) -> str:
        """How its answer began: a start kind, or CACHED."""
        return CACHED if self.cache_result == "hit" else self.start_kind.value

    @property
    def is_cacheable(self) -> bool:
        """Whether an equal call may get its answer: here, unless it is a stream."""
        method = self.target.spec.method(self.method)
        return method is not None and not method.is_generator

    @property
    def place(self) -> str:
        """The called part of its function: a method, or a path of an engine."""
        return self.method

    @property
    def caller_arguments(self) -> bytes:
        """Its arguments as its caller wrote them, which identify a repeat."""
        return self.body

    def park(self) -> None:
        """Drop its body from memory: the journal has it."""
        self.body = b""

    def load(self, body: bytes) -> None:
        """Restore the body of a parked call. Raises InvalidInput."""
        self.body = body

    def kept(self) -> dict[str, Any]:
        """Return additional fields for its journal entry."""
        return {}

    def reading(self, answer: WorkerResponse) -> ResponseFilter | None:
        """Return a reader of its response; None where none is needed."""
        return None

    def request_head(self, execution_s: float) -> bytes:
        """Return the head of the request to the worker."""
        return b"".join(
            (
                b"POST /invoke/",
                self.method.encode(),
                b" HTTP/1.1\r\nhost: worker\r\npilotlight-call: ",
                self.id.encode(),
                b"\r\npilotlight-deadline-s: ",
                b"%.3f" % execution_s,
                b"\r\npilotlight-attempt: %d" % self.attempt if self.attempt > 1 else b"",
                b"\r\ncontent-type: ",
                self.content_type,
                TRUSTED_LINE if self.content_type is PICKLE and self.caller.accepts_pickle else b"",
                b"\r\naccept: " + self.accept if self.accept else b"",
                self.extra_headers,
                priority_lines(self.target, self.caller.rank),
                self.trace_lines(),
                b"\r\ncontent-length: ",
                b"%d" % len(self.body),
                b"\r\n\r\n",
            )
        )

    # -- trace -------------------------------------------------------------------------------------
    def trace_lines(self) -> bytes:
        """Return trace header lines for a worker, each *beginning* with CRLF. Empty if the worker
        can derive the trace from the call's id.

        The trace of a call that waited for a start is kept, so its spans are requested."""
        trace, waited = self.trace, self.start_kind is not StartKind.WARM
        if trace is None:
            if self.attempt == 1 and not waited:
                return b""
            trace = Trace(trace_id_for_call(self.id))
        return trace.lines(self.id, self.attempt, is_sampled=waited or bool(trace.kept_for))

    def traceparent_of_callee(self, given: bytes | None) -> bytes:
        """Return `traceparent` of a call that the function running this one makes: the span in
        which it makes it if `given` names one of the call's trace, else the call's own."""
        trace = self.trace or Trace(trace_id_for_call(self.id))
        parent = parse_traceparent(given) if given is not None else None
        span = (
            parent.span_id
            if parent is not None and parent.trace_id == trace.id
            else attempt_span_id(self.id, self.attempt)
        )
        return format_traceparent(trace.id, span, is_sampled=bool(trace.kept_for)).encode()

    def record_attempt(
        self, reservation: Reservation | None, *, dispatched_ns: int, ended_ns: int, error: str
    ) -> None:
        """Record an attempt that ended without an answer, for the call's trace."""
        if len(self.past) < MAX_ATTEMPTS:
            ended = self.ended_attempt(
                reservation, dispatched_ns=dispatched_ns, ended_ns=ended_ns, error=error
            )
            self.past = (*self.past, ended)

    def ended_attempt(
        self,
        reservation: Reservation | None,
        *,
        dispatched_ns: int,
        ended_ns: int,
        error: str = "",
    ) -> AttemptRecord:
        """Return the record of the attempt that ends now."""
        past = self.past
        return AttemptRecord(
            number=self.attempt,
            waited_ns=past[-1].ended_ns if past else self.received_ns,
            reserved_ns=self.reserved_ns if reservation is not None else 0,
            start_ms=reservation.start_ms if reservation is not None else 0.0,
            instance=reservation.instance if reservation is not None else None,
            dispatched_ns=dispatched_ns,
            ended_ns=ended_ns,
            error=error,
        )


class AnsweredCall:
    """A call with its response: a stored one (`FallbackResponse`, `CachedResponse`), or that of a
    worker (`Attempt`), which alone holds something that its end releases.

    Attributes:
        answer: the response, or its head.
        is_hit: the response cache answered: nothing ran.
        dispatched_ns: when it was sent to the worker (monotonic); 0 = never.
        exec_ms, cost, picos: execution time and price, once it has ended.
        bytes_out: bytes of the response sent to the caller so far.
        cut_by: the error that interrupted it: a deadline's, or that its caller may no longer call;
            None = none did.
        on_cut: called when its response is interrupted.
    """

    answer: WorkerResponse
    is_hit = False
    dispatched_ns = 0
    exec_ms = 0.0
    cost = "0"
    picos = 0
    bytes_out = 0
    cut_by: errors.PilotlightError | None = None
    on_cut: Callable[[], None] | None = None

    def __init__(self, call: Call) -> None:
        self.call = call

    @property
    def held(self) -> Reservation | None:
        """The reservation of its slot; None where no instance answered."""
        return None

    @property
    def ended_ns(self) -> int:
        """When its worker had answered (monotonic)."""
        return self.dispatched_ns + round(self.exec_ms * 1e6)

    def close(self, *, status: int, outcome: str, bytes_out: int, finish: str = "") -> str:
        """End it as its response says. Returns the cost as text."""
        return self.cost

    def fail(self, error: BaseException, *, finish: str = "", is_noted: bool = True) -> None:
        """End it with an error that interrupted the response."""

    def record_retried(self, error: str) -> None:
        """Record that it was answered and closed, and is retried nevertheless."""
        self.call.record_attempt(
            self.held,
            dispatched_ns=self.dispatched_ns,
            ended_ns=self.ended_ns,
            error=error,
        )

    def discard(self) -> None:
        """End it, because its whole response is not used, and another attempt is made."""
        answer = self.answer
        outcome = "ok" if answer.status < 400 else "error"
        self.close(status=answer.status, outcome=outcome, bytes_out=len(answer.body or b""))

    async def crash_error(self) -> errors.PilotlightError:
        """Return the error of a response whose worker's connection broke."""
        return errors.WorkerCrashed("the response broke off", reason="crashed")


def priority_lines(target: CallTarget, rank: QueuePriority) -> bytes:
    """Priority header line for a worker that gathers calls, beginning with CRLF; empty for other
    workers, and for the standard priority."""
    if not target.batched or rank.priority is Priority.STANDARD:
        return b""
    return b"\r\npilotlight-priority: " + rank.priority.value.encode()
