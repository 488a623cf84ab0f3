"""From an admitted call to a worker's answer: reserve → open the record → forward, and the retry rule.

An attempt that fails before any byte of the request reached a worker is made once more elsewhere, because nothing can have happened; one
that
fails later is made again only when the function is declared idempotent and its caller has seen nothing. A worker that says it is busy
(it still finishes a call whose caller left) has not begun either: the call is put back in front.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from activator.billing.account import Ticket
from activator.billing.usage import marked
from activator.choice import Choice
from activator.fairness.rank import DEFAULT_RANK, Rank
from activator.quotas.admission import Admission
from activator.reservation import Releases, Reservation
from activator.routes import Target
from activator.throttler import Throttler
from activator.tracing.context import Attempt, Trace, kind_of, note, worker_lines
from activator.upstream import Answer, UpstreamGone, WorkerConnection
from pilotlight import errors
from pilotlight.pricing import BUSY
from pilotlight.protocol import CONTENT_JSON
from snapshotter.types import StartKind

GONE_REASON_WAIT_S = 0.5
"""A broken connection is seen before the agent's word on why: wait this long for it, so that the caller reads "out of memory", not
"reset"."""
BUSY_PATIENCE_S = 2.0
"""A worker that is still busy with an abandoned call after this long is replaced."""


class Call:
    """One invocation, from the moment its request was read. `now` values are monotonic seconds, `*_ns` monotonic nanoseconds.

    Attributes:
        admission: what it holds of its quotas until its end; None = nothing.
        choice: why `target` answers it; None = it is the only one, and there is nothing to say.
        rank: its place among those that wait.
        caller: id of the tenant that calls another one's function; "" = the function's own, who pays in either case.
        began_ns, routed_ns: when its request was there, and when it was routed; without the time that its body took to come. `received_ns`:
            when it was admitted.
        attempt: which one this is, from 1, of those that took a slot; `retries`: those of them that the function's own policy asked for.
        trace: its place in a trace; None = one of its own, and nobody asked for it. `past`: attempts before the one that runs.
        degraded: what answers in place of the target that was asked, as `pilotlight-degraded` says it; "" for the target itself.
        asked: the target that was asked, where `target` is a variant or a fallback of it; None where it is `target`.
    """

    __slots__ = ("accept", "admission", "asked", "attempt", "began_ns", "body", "caller", "choice", "content_type", "deadline_s",
                 "degraded", "extra_headers", "id", "key_id", "method", "past", "path", "rank", "received_ns", "reserved_ns", "retries",
                 "routed_ns", "start_kind", "start_ms", "started_at", "target", "trace", "weights")  # fmt: skip

    def __init__(
        self,
        *,
        id: str,
        target: Target,
        method: str,
        key_id: str,
        body: bytes,
        content_type: bytes = CONTENT_JSON.encode(),
        accept: bytes = b"",
        deadline_s: float | None = None,
        extra_headers: bytes = b"",
        admission: Admission | None = None,
        rank: Rank = DEFAULT_RANK,
        caller: str = "",
        choice: Choice | None = None,
    ) -> None:
        self.id = id
        self.target = target
        self.method = method
        self.key_id = key_id
        self.body = body
        self.content_type = content_type
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
        self.asked: Target | None = None
        self.began_ns = self.routed_ns = self.received_ns = time.monotonic_ns()
        self.started_at = time.time()
        self.reserved_ns = 0
        self.start_kind = StartKind.WARM
        self.start_ms = 0.0
        self.weights = ""

    def __repr__(self) -> str:
        return f"<Call {self.id} {self.target!r} attempt {self.attempt}>"

    @property
    def mark(self) -> str:
        """What its records say that few do (`usage.marked`): its arm, and what answered in place of the target."""
        mark = self.choice.mark if self.choice is not None else ""
        return mark + marked(degraded=self.degraded) if self.degraded else mark

    @property
    def queued_ms(self) -> float:
        """Milliseconds from arrival to a slot, without the start it waited for."""
        return max(0.0, (self.reserved_ns - self.received_ns) / 1e6 - self.start_ms)

    def remaining_s(self, clock_s: float) -> float:
        """Seconds left of the caller's own deadline, at most `clock_s`."""
        if self.deadline_s is None:
            return clock_s
        return min(clock_s, self.deadline_s - (time.monotonic_ns() - self.received_ns) / 1e9)

    def request_head(self, execution_s: float) -> bytes:
        """The request to the worker, up to its body."""
        return b"".join(
            (
                b"POST /invoke/", self.method.encode(), b" HTTP/1.1\r\nhost: worker\r\npilotlight-call: ", self.id.encode(),
                b"\r\npilotlight-deadline-s: ", b"%.3f" % execution_s,
                b"\r\ncontent-type: ", self.content_type,
                b"\r\naccept: " + self.accept if self.accept else b"",
                self.extra_headers, worker_lines(self),
                b"\r\ncontent-length: ", b"%d" % len(self.body), b"\r\n\r\n",
            )
        )  # fmt: skip


class Exchange:
    """One attempt that reached a worker and has its answer, whole or streaming. Whoever holds it must `close` it exactly once.

    The execution clock runs until the last byte (`spec.Clocks`): a stream that does not end with it is closed, billed and cut off.
    """

    __slots__ = ("_clock", "_is_closed", "answer", "call", "connection", "cost", "dispatched_ns", "exec_ms", "reservation",
                 "ticket")  # fmt: skip

    def __init__(
        self, call: Call, *, reservation: Reservation, ticket: Ticket, connection: WorkerConnection, answer: Answer, dispatched_ns: int
    ) -> None:
        self.call = call
        self.reservation = reservation
        self.ticket = ticket
        self.connection = connection
        self.answer = answer
        self.dispatched_ns = dispatched_ns
        self.exec_ms = 0.0
        self.cost = "0"
        self._is_closed = False
        self._clock = self._watch() if answer.body is None else None

    def _watch(self) -> asyncio.TimerHandle:
        ran_s = (time.monotonic_ns() - self.dispatched_ns) / 1e9
        left_s = self.call.remaining_s(self.call.target.spec.clocks.execution_s - ran_s)
        return asyncio.get_running_loop().call_later(max(0.0, left_s), self._overrun)

    def _overrun(self) -> None:
        """It may never end, and its caller may not even read: billed now, and its instance is replaced."""
        self.connection.close()
        self.reservation.instance.is_stuck = True
        self.reservation.throttler.drain(self.reservation.instance)
        self.close(status=504, outcome="error", bytes_out=0)

    @property
    def is_busy(self) -> bool:
        """Whether the worker did not begin: it still finishes another call."""
        return self.answer.status == 503 and self.answer.header(b"pilotlight-outcome") == b"busy"

    def close(self, *, status: int, outcome: str, bytes_out: int) -> str:
        """End the attempt: the record is closed, the slot and the connection are given back. Returns the cost as text.

        Nothing more happens when the execution clock has ended it before.
        """
        if self._is_closed:
            return self.cost
        self._is_closed = True
        if self._clock is not None:
            self._clock.cancel()
        now_ns = time.monotonic_ns()
        self.exec_ms = (now_ns - self.dispatched_ns) / 1e6
        body_bytes = len(self.call.body)
        try:
            self.cost = self.reservation.close(self.ticket, status=status, outcome=outcome, bytes_in=body_bytes, bytes_out=bytes_out)
        finally:  # a record that cannot be closed must not cost a slot as well
            self.reservation.instance.connections.give_back(self.connection, now_ns / 1e9)
            self.reservation.release()
        return self.cost


def _free(target: Target, limit_s: float) -> None:
    """Calls that nobody counts the money of."""


class Dispatcher:
    """Runs calls on reserved slots."""

    def __init__(self, *, throttler_of: Callable[[Target], Throttler], may_pay: Callable[[Target, float], None] = _free) -> None:
        """`may_pay` raises when no budget lets a call of this target run for so many seconds: asked before a call waits for a slot."""
        self.throttler_of = throttler_of
        self._may_pay = may_pay

    def check(self, call: Call) -> None:
        """Refuse a call that its budgets cannot pay before it waits, or has an instance started. Raises OverBudget, BudgetReserved."""
        self._may_pay(call.target, call.remaining_s(call.target.spec.clocks.execution_s))

    def check_start(self, target: Target) -> None:
        """The same for a start that no call waits for: nothing is started that could not run one. Raises OverBudget, BudgetReserved."""
        self._may_pay(target, target.spec.clocks.execution_s)

    async def begin(self, call: Call) -> Exchange:
        """Reserve, open the record, forward; returns when the answer (or its head) is there.

        Raises TooManyRequests, DeadlineExceeded, StartFailed, Unavailable, WorkerCrashed, JournalFull, OverBudget. Cancelling it frees
        everything.
        """
        throttler = self.throttler_of(call.target)
        busy_since = 0.0
        while True:
            reservation = throttler.reserve_nowait()
            if reservation is None:
                self.check(call)
                reservation = await throttler.reserve(call.remaining_s(call.target.spec.clocks.queue_s), rank=call.rank)
            call.reserved_ns = time.monotonic_ns()
            if reservation.start_kind is not StartKind.WARM:
                call.start_kind = reservation.start_kind
                call.start_ms += reservation.start_ms
                call.weights = reservation.weights
            try:
                exchange = await self._forward(call, reservation)
            except UpstreamGone as e:
                await self._judge(call, reservation, e)
                await self._pay_again(call)
                continue
            if not exchange.is_busy:
                return exchange
            busy_since = self._put_back(exchange, throttler, busy_since)

    async def begin_again(self, busy: Exchange) -> Exchange:
        """`begin` for a call whose worker said that it is busy."""
        self._put_back(busy, busy.reservation.throttler, 0.0)
        return await self.begin(busy.call)

    async def begin_after(self, call: Call, reservation: Reservation, gone: UpstreamGone) -> Exchange:
        """`begin` for a call whose worker is gone, where the retry rule allows it. Raises WorkerCrashed where it does not."""
        await self._judge(call, reservation, gone)
        await self._pay_again(call)
        return await self.begin(call)

    async def _pay_again(self, call: Call) -> None:
        """An attempt more is a request more; a worker that was busy is none, because nothing ran. Raises OverQuota, Unavailable."""
        if call.admission is not None:
            await call.admission.again()

    async def _forward(self, call: Call, reservation: Reservation) -> Exchange:
        instance = reservation.instance
        connection: WorkerConnection | None = None
        ticket: Ticket | None = None
        dispatched_ns = 0
        loop = asyncio.get_running_loop()
        try:
            ticket = await reservation.open_paid(call)
            connection = instance.connections.take_nowait(call.reserved_ns / 1e9) or await instance.connections.open(loop)
            execution_s = call.remaining_s(call.target.spec.clocks.execution_s)
            dispatched_ns = time.monotonic_ns()
            future = connection.request(call.request_head(execution_s) + call.body, loop=loop)
            timer = loop.call_later(execution_s, self._overrun, future, reservation, execution_s)
            try:
                answer = await future
            finally:
                timer.cancel()
            return Exchange(call, reservation=reservation, ticket=ticket, connection=connection, answer=answer, dispatched_ns=dispatched_ns)
        except BaseException as e:
            note(call, reservation, dispatched_ns=dispatched_ns, ended_ns=time.monotonic_ns(), error=kind_of(e))
            if connection is not None:
                connection.close()
            try:
                if ticket is not None:
                    reservation.close(ticket, status=status_of(e), outcome=_outcome_of(e), bytes_in=len(call.body), bytes_out=0)
            finally:
                reservation.release()
            raise

    def _overrun(self, future: asyncio.Future[Answer], reservation: Reservation, execution_s: float) -> None:
        if not future.done():
            future.set_exception(errors.DeadlineExceeded(f"the call ran longer than {execution_s:g} s", clock="execution"))
            reservation.instance.is_stuck = True
            reservation.throttler.drain(reservation.instance)  # it may never return: replaced, its neighbours finish first

    async def _judge(self, call: Call, reservation: Reservation, gone: UpstreamGone) -> None:
        """Return when the call may be tried again; raise WorkerCrashed when it may not."""
        instance = reservation.instance
        may_retry = call.attempt == 1 and (not gone.sent or call.target.spec.idempotent)
        if may_retry:
            call.attempt += 1
            reservation.throttler.drain(instance)
            return
        reason = instance.gone_reason or await instance.wait_gone(GONE_REASON_WAIT_S)
        if not instance.is_gone:
            reservation.throttler.drain(instance)
        why = {"out_of_memory": "ran out of memory", "": "died"}.get(reason, f"ended ({reason})")
        raise errors.WorkerCrashed(
            f"the instance {why} under this call; another takes its place", reason=reason or "crashed", worker=instance.id
        ) from gone

    def _put_back(self, exchange: Exchange, throttler: Releases, busy_since: float) -> float:
        now = time.monotonic()
        instance = exchange.reservation.instance
        instance.block(now)
        exchange.close(status=503, outcome=BUSY, bytes_out=0)
        exchange.call.attempt += 1
        if busy_since and now - busy_since > BUSY_PATIENCE_S:
            throttler.drain(instance)
        return busy_since or now


def status_of(error: BaseException) -> int:
    """What the record of an attempt that ended so says."""
    if isinstance(error, errors.PilotlightError):
        return error.status
    return 499 if isinstance(error, asyncio.CancelledError) else 502


def _outcome_of(error: BaseException) -> str:
    return "cancelled" if isinstance(error, asyncio.CancelledError) else "error"
