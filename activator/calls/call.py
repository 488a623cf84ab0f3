"""A call on its way, and its exchange with the worker that answers it."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable
from typing import Any, Protocol

from activator.balancing.instance import Instance
from activator.balancing.reservation import WARM, Reservation
from activator.billing.instance_meter import OpenRecord
from activator.billing.usage import marked
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
"""An engine that wrote in the last twentieth of its call's time was writing to the end of it."""


class Reading(Protocol):
    """Reads one answer on its way to a caller, and takes out of it what was not asked for."""

    def feed(self, data: bytes, now_ns: int) -> bytes:
        """What of these bytes is the caller's; of a stream, whole events."""
        ...

    def collected(self, status: int, body: bytes) -> tuple[int, bytes]:
        """Status and body of an answer that is over and was collected, `body` being what `feed`
        gave.

        Raises WorkerConnectionLost: it is not.
        """
        ...


class Call:
    """One invocation, from the moment its request was read. `now` values are monotonic seconds,
    `*_ns` monotonic nanoseconds.

    Attributes:
        admission: what it holds of its quotas until its end; None = nothing. choice: why `target`
        answers it; None = it is the only one, and there is nothing to say. rank: its place among
        those that wait. caller: id of the tenant that calls another one's function; "" = the
        function's own, who pays in either case. began_ns, routed_ns: when its request was there,
        and when it was routed; without the time that its body took to come. `received_ns`:
            when it was admitted.
        attempt: which one this is, from 1, of those that took a slot; `retries`: those of them that
        the function's own policy asked for. trace: its place in a trace; None = one of its own, and
        nobody asked for it. `past`: attempts before the one that runs. content_type:
        `payloads.JSON` or `payloads.PICKLE`. accepts_pickle: whether its function opens a pickle of
        its caller; a worker refuses one that comes without this. degraded: what answers in place of
        the target that was asked, as `pilotlight-degraded` says it; "" for the target itself.
        asked: the target that was asked, where `target` is a variant or a fallback of it; None
        where it is `target`. tokens: a language model's tokens, as far as they are known; None = it
        is none. affinity: what calls with the same beginning have in common, so that they may meet
        on one instance; None = nothing.
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
        """`began_ns`: when its request was there, and routed at once; 0 = now, or the caller sets
        it."""
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
        """What its records say that few do (`usage.marked`): its arm, and what answered in place of
        the target."""
        mark = self.choice.mark if self.choice is not None else ""
        if self.degraded or self.tokens is not None:
            mark += marked(degraded=self.lessened)
        return mark

    @property
    def lessened(self) -> str:
        """All that `pilotlight-degraded` says: what answers in place of its target, and how its
        answer is cut; "" for neither."""
        cut = self.tokens.degraded if self.tokens is not None else ""
        return f"{self.degraded}, {cut}" if self.degraded and cut else self.degraded or cut

    @property
    def queued_ms(self) -> float:
        """Milliseconds from arrival to a slot, without the start it waited for."""
        return max(0.0, (self.reserved_ns - self.received_ns) / 1e6 - self.start_ms)

    def remaining_s(self, clock_s: float) -> float:
        """Seconds left of the caller's own deadline, at most `clock_s`."""
        if self.deadline_s is None:
            return clock_s
        return min(clock_s, self.deadline_s - (time.monotonic_ns() - self.received_ns) / 1e9)

    @property
    def blame(self) -> Outcome:
        """What it says of the revision that this call was cut off: nothing where its caller's own
        deadline did it."""
        return Outcome.NEITHER if self.remaining_s(1.0) <= 0 else Outcome.FAILED

    def stand_in(self, target: CallTarget, degraded: str) -> Call:
        """The same call as answered by something else, which `degraded` names: what was asked stays
        known, its clocks run on.

        Raises InvalidInput for a function that does not understand what this one was asked: an
        engine's path, where it is none. UnsupportedMediaType for a pickle where that function is
        another tenant's."""
        if self.content_type is PICKLE and target.tenant != self.target.tenant:
            raise not_accepted()
        other = copy.copy(self)
        other.target = target
        other.degraded = degraded
        if target is not self.target:
            other.body = self.body_for(target)
            other.asked = self.asked or self.target
            # an arm is a revision of what was asked: no record of another's may carry it
            other.choice = None
        return other

    def body_for(self, target: CallTarget) -> bytes:
        """Its body for another function in its place. Raises InvalidInput for one that is called
        otherwise."""
        if target.spec.engine is not None:
            raise errors.InvalidInput(
                f"{target.app}/{target.function} is a language model, and takes no arguments"
            )
        return self.body

    @property
    def place(self) -> str:
        """What of its function it calls: a method, or a path of an engine's."""
        return self.method

    @property
    def said(self) -> bytes:
        """Its arguments as its caller wrote them: a repeat is known by these."""
        return self.body

    def park(self) -> None:
        """Keep its body in memory no longer: a journal has it."""
        self.body = b""

    def load(self, body: bytes) -> None:
        """Have the body of a parked call again. Raises InvalidInput."""
        self.body = body

    def kept(self) -> dict[str, Any]:
        """What a journal has to hold of it beside what it holds of every call."""
        return {}

    def reading(self, answer: WorkerResponse) -> Reading | None:
        """What reads its answer as it goes by; None where nobody needs to."""
        return None

    def request_head(self, execution_s: float) -> bytes:
        """The request to the worker, up to its body."""
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
    """One attempt that reached a worker and has its answer, whole or streaming. Whoever holds it
    must `close` it exactly once.

    The execution clock runs until the last byte (`spec.Clocks`): a stream that does not end with it
    is closed, billed and cut off.

    Attributes:
        bytes_out: of a stream: what its caller was sent so far.
        cut_by: the clock that cut it off; None = none did.
        on_cut: told when one does.
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
            max(0.0, left_s), self._overrun if left_s >= whole_s else self._leave
        )

    @property
    def held(self) -> Reservation | None:
        """Its slot; None where no instance answered."""
        return self.reservation

    @property
    def instance(self) -> Instance | None:
        """The instance that answered; None where none did."""
        return self.reservation.instance

    def _overrun(self) -> None:
        """It may never end: billed now, and its instance is replaced, unless that goes on as it
        should and only its caller does not read, or has asked for more than fits into the time."""
        self._is_blameless = self.connection.is_ahead or self._is_writing
        if not self._is_blameless:
            self.reservation.instance.is_stuck = True
            self.reservation.throttler.drain(self.reservation.instance)
        self._cut(f"the call ran longer than {self.call.target.spec.clocks.execution_s:g} s")

    @property
    def _is_writing(self) -> bool:
        """Whether a language model has just written more."""
        tokens = self.call.tokens
        lively_ns = self.call.target.spec.clocks.execution_s * 1e9 / LIVELY
        return (
            tokens is not None
            and tokens.last_ns > 0
            and time.monotonic_ns() - tokens.last_ns < lively_ns
        )

    def _leave(self) -> None:
        """Its caller's own deadline came: it is billed now."""
        self._cut(
            f"the caller's deadline of {self.call.deadline_s:g} s came in the middle of the answer"
        )

    def _cut(self, why: str) -> None:
        self.cut_by = errors.DeadlineExceeded(why, clock="execution")
        self.connection.close()
        self.close(status=504, outcome="error", bytes_out=self.bytes_out, finish="error")
        if self.on_cut is not None:
            self.on_cut()

    @property
    def is_busy(self) -> bool:
        """Whether the worker did not begin: it still finishes another call."""
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
        """End the attempt: the record is closed, the slot and the connection are given back.
        Returns the cost as text.

        `finish`: why a stream ended (`engines.FINISH_REASONS`), where no `tokens` of the call say
        it. `is_own_word`: user code said in its stream that it failed.

        Nothing more happens when the execution clock has ended it before.
        """
        if self._is_closed:
            return self.cost
        self._is_closed = True
        if self._clock is not None:
            self._clock.cancel()
        if status >= 500:  # the worker's own word, or its end
            is_said = is_own_word or status == self.answer.status
            self.reservation.ending = (
                Outcome.NEITHER
                if self._is_blameless
                else Outcome.RAISED
                if is_said
                else self.call.blame
            )
        if finish and self.call.tokens is None:
            self.ticket.mark += marked(finish=finish)
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
        finally:  # a record that cannot be closed must not cost a slot as well
            self.reservation.instance.connections.give_back(self.connection, now_ns / 1e9)
            self.reservation.release()
        return self.cost
