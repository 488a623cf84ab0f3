"""A call, and its exchange with the worker that answers it."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable
from typing import Any, Protocol

from activator.balancing.instance import Instance
from activator.balancing.reservation import WARM, Reservation
from activator.billing.instance_meter import OpenRecord
from activator.billing.usage import encode_optional_fields
from activator.fairness.queue_priority import DEFAULT_RANK, QueuePriority
from activator.http.payloads import JSON, PICKLE, TRUSTED_LINE, not_accepted
from activator.llm.token_reservation import TokenReservation
from activator.metrics.batching import priority_lines
from activator.quotas.admission import Admission
from activator.resilience.breaker import Outcome
from activator.routing.route_table import CallTarget
from activator.routing.traffic_split import RoutingDecision
from activator.tracing.context import Attempt, Trace, worker_lines
from activator.worker_client.connection import WorkerConnection, WorkerResponse
from pilotlight import errors
from snapshotter.types import StartKind

LIVELY = 20
"""An engine that produced output in the last twentieth of its call's time counts as still
producing."""


class ResponseFilter(Protocol):
    """Reads one response on its way to a caller, and removes parts that the caller did not
    request."""

    def feed(self, data: bytes, now_ns: int) -> bytes:
        """Return the part of these bytes that goes to the caller; of a stream, whole events."""
        ...

    def collected(self, status: int, body: bytes) -> tuple[int, bytes]:
        """Return status and body of a complete, collected response; `body` is the output of `feed`.

        Raises WorkerConnectionLost for an incomplete one.
        """
        ...


class Call:
    """One invocation, once its request was read. `now` values are monotonic seconds, `*_ns`
    monotonic nanoseconds.

    Attributes:
        admission: its holdings of quotas until its end; None = none.
        choice: why `target` answers it; None = it is the only one, and needs no explanation.
        rank: its priority in queues.
        caller: id of the tenant that calls another one's function; "" = the function's own. The
            function's tenant pays in either case.
        began_ns, routed_ns: when its request arrived, and when it was routed; without the upload
            time of its body.
        received_ns: when it was admitted.
        attempt: number of the attempt, from 1, among those that took a slot.
        retries: number of attempts by the function's own retry policy.
        trace: its position in a trace; None = an own, unrequested trace.
        past: earlier attempts.
        content_type: `payloads.JSON` or `payloads.PICKLE`.
        accepts_pickle: whether its function accepts a pickle of its caller; a worker refuses a
            pickle without this.
        degraded: the variant or fallback that answers, for `pilotlight-degraded`; "" for the
            requested target.
        asked: the requested target, where `target` is a variant or a fallback; else None.
        tokens: a language model's tokens, as far as they are known; None for other functions.
        affinity: hash of the prompt's beginning, which routes similar calls to one instance; None =
            none.
    """

    __slots__ = (
        "accept",
        "accepts_pickle",
        "admission",
        "asked",
        "attempt",
        "began_ns",
        "body",
        "caller",
        "choice",
        "content_type",
        "deadline_s",
        "degraded",
        "extra_headers",
        "id",
        "key_id",
        "method",
        "past",
        "rank",
        "received_ns",
        "reserved_ns",
        "retries",
        "routed_ns",
        "start_kind",
        "start_ms",
        "started_at",
        "target",
        "trace",
        "weights",
    )

    tokens: TokenReservation | None = None
    affinity: int | None = None

    def __init__(
        self,
        *,
        id: str,
        target: CallTarget,
        method: str,
        key_id: str,
        body: bytes,
        content_type: bytes = JSON,
        accept: bytes = b"",
        deadline_s: float | None = None,
        extra_headers: bytes = b"",
        admission: Admission | None = None,
        rank: QueuePriority = DEFAULT_RANK,
        caller: str = "",
        choice: RoutingDecision | None = None,
        began_ns: int = 0,
        accepts_pickle: bool = False,
    ) -> None:
        """`began_ns`: when its request arrived and was routed; 0 = now, or the caller sets it."""
        self.id = id
        self.target = target
        self.method = method
        self.key_id = key_id
        self.body = body
        self.content_type = content_type
        self.accepts_pickle = accepts_pickle
        self.accept = accept
        self.deadline_s = deadline_s
        self.extra_headers = extra_headers
        self.admission = admission
        self.rank = rank
        self.caller = caller
        self.choice = choice
        self.attempt = 1
        self.trace: Trace | None = None
        self.past: tuple[Attempt, ...] = ()
        self.retries = 0
        self.degraded = ""
        self.asked: CallTarget | None = None
        self.received_ns = now_ns = time.monotonic_ns()
        self.began_ns = self.routed_ns = began_ns or now_ns
        self.started_at = time.time()
        self.reserved_ns = 0
        self.start_kind: StartKind = WARM
        self.start_ms = 0.0
        self.weights = ""

    def __repr__(self) -> str:
        return f"<Call {self.id} {self.target!r} attempt {self.attempt}>"

    @property
    def mark(self) -> str:
        """Optional marks of its usage records (`usage.encode_optional_fields`): its arm, and the
        variant or fallback that answered."""
        mark = self.choice.mark if self.choice is not None else ""
        if self.degraded or self.tokens is not None:
            mark += encode_optional_fields(degraded=self.degradation)
        return mark

    @property
    def degradation(self) -> str:
        """The value of `pilotlight-degraded`: the variant or fallback that answers, and how its
        response is shortened; "" for neither."""
        cut = self.tokens.degraded if self.tokens is not None else ""
        return f"{self.degraded}, {cut}" if self.degraded and cut else self.degraded or cut

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
        if target.spec.engine is not None:
            raise errors.InvalidInput(
                f"{target.app}/{target.function} is a language model, and takes no arguments"
            )
        return self.body

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
                TRUSTED_LINE if self.content_type is PICKLE and self.accepts_pickle else b"",
                b"\r\naccept: " + self.accept if self.accept else b"",
                self.extra_headers,
                priority_lines(self.target, self.rank),
                worker_lines(self),
                b"\r\ncontent-length: ",
                b"%d" % len(self.body),
                b"\r\n\r\n",
            )
        )


class Exchange:
    """One attempt with a worker's response, whole or streaming. Its holder must `close` it exactly
    once.

    The execution clock runs until the last byte (`spec.function.Clocks`): a stream that exceeds it
    is closed, billed and interrupted.

    Attributes:
        bytes_out: bytes of a stream sent to the caller so far.
        cut_by: the error of the clock that interrupted it; None = none did.
        on_cut: called when a clock interrupts it.
    """

    __slots__ = (
        "_clock",
        "_is_blameless",
        "_is_closed",
        "answer",
        "bytes_out",
        "call",
        "connection",
        "cost",
        "cut_by",
        "dispatched_ns",
        "exec_ms",
        "on_cut",
        "reservation",
        "ticket",
    )

    def __init__(
        self,
        call: Call,
        *,
        reservation: Reservation,
        ticket: OpenRecord,
        connection: WorkerConnection,
        answer: WorkerResponse,
        dispatched_ns: int,
    ) -> None:
        self.call = call
        self.reservation = reservation
        self.ticket = ticket
        self.connection = connection
        self.answer = answer
        self.dispatched_ns = dispatched_ns
        self.exec_ms = 0.0
        self.cost = "0"
        self.bytes_out = 0
        self.cut_by: errors.DeadlineExceeded | None = None
        self.on_cut: Callable[[], None] | None = None
        self._is_blameless = False
        self._is_closed = False
        self._clock = self._watch() if answer.body is None else None

    def _watch(self) -> asyncio.TimerHandle:
        ran_s = (time.monotonic_ns() - self.dispatched_ns) / 1e9
        whole_s = self.call.target.spec.clocks.execution_s - ran_s
        left_s = self.call.remaining_s(whole_s)
        return asyncio.get_running_loop().call_later(
            max(0.0, left_s), self._overrun if left_s >= whole_s else self._expire
        )

    @property
    def held(self) -> Reservation | None:
        """The reservation of its slot; None where no instance answered."""
        return self.reservation

    @property
    def instance(self) -> Instance | None:
        """The instance that answered; None where none did."""
        return self.reservation.instance

    def _overrun(self) -> None:
        """The execution clock ran out: bill it now, and replace its instance, which may hang,
        unless the instance makes progress and only its caller does not read, or requested more than
        fits into the time."""
        self._is_blameless = self.connection.is_ahead or self._is_writing
        if not self._is_blameless:
            self.reservation.instance.is_stuck = True
            self.reservation.throttler.drain(self.reservation.instance)
        self._interrupt(f"the call ran longer than {self.call.target.spec.clocks.execution_s:g} s")

    @property
    def _is_writing(self) -> bool:
        """Whether a language model has just produced output."""
        tokens = self.call.tokens
        lively_ns = self.call.target.spec.clocks.execution_s * 1e9 / LIVELY
        return (
            tokens is not None
            and tokens.last_ns > 0
            and time.monotonic_ns() - tokens.last_ns < lively_ns
        )

    def _expire(self) -> None:
        """The caller's own deadline expired: bill it now."""
        self._interrupt(
            f"the caller's deadline of {self.call.deadline_s:g} s expired before the end of the "
            f"response"
        )

    def _interrupt(self, why: str) -> None:
        self.cut_by = errors.DeadlineExceeded(why, clock="execution")
        self.connection.close()
        self.close(status=504, outcome="error", bytes_out=self.bytes_out, finish="error")
        if self.on_cut is not None:
            self.on_cut()

    @property
    def is_busy(self) -> bool:
        """Whether the worker did not begin, because it still runs another call."""
        return self.answer.status == 503 and self.answer.header(b"pilotlight-outcome") == b"busy"

    def close(
        self,
        *,
        status: int,
        outcome: str,
        bytes_out: int,
        finish: str = "",
        is_own_word: bool = False,
    ) -> str:
        """End the attempt: close the record, release the slot and the connection. Returns the cost
        as text. Does nothing if the execution clock has ended it before.

        `finish`: why a stream ended (`engines.FINISH_REASONS`), where the call has no `tokens` with
        it. `is_own_word`: user code reported its failure in the stream.
        """
        if self._is_closed:
            return self.cost
        self._is_closed = True
        if self._clock is not None:
            self._clock.cancel()
        if status >= 500:  # reported by the worker, or the worker ended
            is_said = is_own_word or status == self.answer.status
            self.reservation.ending = (
                Outcome.NEITHER
                if self._is_blameless
                else Outcome.RAISED
                if is_said
                else self.call.blame
            )
        if finish and self.call.tokens is None:
            self.ticket.mark += encode_optional_fields(finish=finish)
        now_ns = time.monotonic_ns()
        self.exec_ms = (now_ns - self.dispatched_ns) / 1e6
        body_bytes = len(self.call.body)
        try:
            self.cost = self.reservation.close(
                self.ticket,
                status=status,
                outcome=outcome,
                bytes_in=body_bytes,
                bytes_out=bytes_out,
            )
        finally:  # a record that cannot be closed must not leak the slot
            self.reservation.instance.connections.release(self.connection, now_ns / 1e9)
            self.reservation.release()
        return self.cost
