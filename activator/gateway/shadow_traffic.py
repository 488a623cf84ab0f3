"""Shadow traffic: copies of calls for a revision whose responses are compared and discarded.

A copy is made after its caller got the response, runs in its own task, and uses only spare
capacity: a free slot of the shadow's own instances, while no call and no start waits for capacity.
Quotas and budgets do not apply to it, its record costs nothing, and its instances are billed to the
platform while they answer no other calls. Over a minute, copies use at most their share
(`max_compute`) of the execution time of the calls that they copy; a copy without capacity is
skipped, and counted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from activator.arguments.validator import CheckTooExpensive
from activator.balancing.instance import Reservation
from activator.balancing.throttler import Throttler
from activator.billing.errors import JournalFull
from activator.calls.attempt import Attempt
from activator.calls.call import AnsweredCall, Call
from activator.calls.caller import Caller
from activator.http.payloads import JSON, Payload
from activator.routing.call_target import CallTarget
from activator.routing.traffic_split import RoutingDecision, ShadowTarget
from activator.tracing.tracer import Tracer
from activator.worker_client.connection import WorkerConnectionLost
from pilotlight import errors
from pilotlight.spec.observations import SHADOW_ARM
from pilotlight.validation.json_compare import differences

log = logging.getLogger(__name__)

WINDOW_S: Final = 60
"""Seconds over which the share of execution time is measured."""
MAX_COPIES: Final = 64
"""Most concurrent copies; each holds its arguments and the response that it is compared with."""
MAX_COPIED_BYTES: Final = 1024**2
"""Limit of arguments and response of one copy: at most 64 MiB for all copies."""
MAX_COMPARED_BYTES: Final = 256 * 1024
"""Limit of each of two responses that are compared as values: parsing them blocks the event loop
for some milliseconds. Larger ones are compared as bytes."""


class _NotRun(Exception):
    """Raised when the shadow's instance still runs an abandoned call, or cannot be sent one."""


_NOT_MADE = (JournalFull, _NotRun, CheckTooExpensive)
"""Errors of a copy that do not count against the revision."""


class ShadowObserver(Protocol):
    """Observes the outcomes of copies."""

    def shadowed(
        self, target: CallTarget, *, status: int, exec_ms: float, matched: bool | None
    ) -> None:
        """A copy was answered; `matched`: None where the responses cannot be compared."""

    def skipped(self, target: CallTarget) -> None:
        """A copy was skipped."""


class ShadowBudget:
    """Execution time of a function's calls and of their copies over the last WINDOW_S seconds, in
    milliseconds; `now` in seconds.

    Time that a copy used beyond its share of a whole window is a debt, which later calls pay off; a
    copy that is expected to exceed the share of a window is made when there is no debt, so that one
    slow copy does not stop all later ones."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, float, float]] = deque()
        self._own = 0.0
        self._copied = 0.0
        self._owed = 0.0
        self._share = 0.0
        self._since: int | None = None
        self._running: dict[str, tuple[float, float]] = {}
        self.expected = 0.0

    def __repr__(self) -> str:
        return (
            f"<Compute {self._copied:.0f} of {self._own:.0f} ms copied, {self.reserved:.0f} ms "
            f"reserved, {self._owed:.0f} ms owed>"
        )

    @property
    def reserved(self) -> float:
        """Expected execution time of the running copies."""
        return sum(expected for _, expected in self._running.values())

    def add(self, now: float, *, own: float = 0.0, copied: float = 0.0) -> None:
        """Add the execution time of a call, or of a copy."""
        second = int(now)
        if self._since is None:
            self._since = second
        self._own += own
        self._copied += copied
        if self._seconds and self._seconds[-1][0] >= second:
            at, owns, copies = self._seconds[-1]
            self._seconds[-1] = (at, owns + own, copies + copied)
        else:
            self._seconds.append((second, own, copied))
        self._drop_before(second - WINDOW_S)

    def begin(self, copy: str, now: float, expected: float) -> None:
        """A copy begins; `expected`: its expected execution time."""
        self._running[copy] = (now, expected)

    def end(self, copy: str) -> None:
        """A copy has ended."""
        del self._running[copy]

    def ran(self, took: float) -> None:
        """Update the expected execution time of copies by a measured one."""
        self.expected = took if not self.expected else 0.8 * self.expected + 0.2 * took

    def may_run(self, expected: float, share: float, now: float = 0.0) -> bool:
        """Return whether a copy with the `expected` execution time keeps all copies within their
        share."""
        self._share = share
        running = sum(max(known, (now - began) * 1000) for began, known in self._running.values())
        taken, allowed = self._copied + max(0.0, self._owed) + running, share * self._own
        if taken + expected <= allowed:
            return True
        is_whole = self._since is not None and self._seconds[-1][0] - self._since >= WINDOW_S
        return is_whole and not taken and expected > allowed > 0

    def _drop_before(self, until: int) -> None:
        seconds = self._seconds
        while seconds[0][0] <= until:
            _, own, copied = seconds.popleft()
            self._own -= own
            self._copied -= copied
            if not any(copies for _, _, copies in seconds):
                self._copied = 0.0  # avoids rounding residue
            # an unused allowance expires
            self._owed = max(self._owed + copied - self._share * own, -self._copied)


class _Copy(NamedTuple):
    """One copy: the call, the response that its caller got, and the budget that its execution time
    counts towards."""

    call: Call
    shadow: ShadowTarget
    status: int
    body: bytes
    compute: ShadowBudget


class ShadowTraffic:
    """Runs copies of calls. Owner: the event loop. `is_crowded`: whether calls or starts wait for
    capacity; copies are then skipped."""

    def __init__(
        self,
        *,
        throttler_of: Callable[[CallTarget], Throttler],
        observer: ShadowObserver,
        is_crowded: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
        tracer: Tracer | None = None,
        make_budget: Callable[[], ShadowBudget] = ShadowBudget,
    ) -> None:
        self._make_budget = make_budget
        self._throttler_of = throttler_of
        self._observer = observer
        self._is_crowded = is_crowded
        self._clock = clock
        self._draw = draw
        self._tracer = tracer or Tracer()
        self._computes: dict[str, ShadowBudget] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<ShadowTraffic {len(self._tasks)} copies running>"

    def copy(self, call: Call, *, status: int, body: bytes, exec_ms: float) -> None:
        """Copy an answered call to its shadow, if there is one and the share allows it. `body`: the
        response. Returns at once."""
        shadow = call.choice.shadow if call.choice is not None else None
        if shadow is None or call.degraded:
            return
        compute = self._compute_of(call.target)
        compute.add(self._clock(), own=exec_ms)
        if self._draw() * 100 >= shadow.percent:
            return
        expected_ms = compute.expected or exec_ms
        is_small = len(call.body) + len(body) <= MAX_COPIED_BYTES
        has_room = len(self._tasks) < MAX_COPIES and not self._is_crowded()
        if (
            not is_small
            or not has_room
            or not compute.may_run(expected_ms, shadow.max_compute, self._clock())
        ):
            self._observer.skipped(shadow.target)
            return
        compute.begin(call.id, self._clock(), expected_ms)
        copy = _Copy(call, shadow, status, body, compute)
        task = asyncio.get_running_loop().create_task(self._run(copy), name=f"copy of {call.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def answered(
        self, attempt: AnsweredCall, status: int, *, body: bytes | None, first_byte_ms: float | None
    ) -> None:
        """Copy a call whose whole response was sent; a stream is not copied, nor is a call that the
        response cache answered."""
        if attempt.call.choice is not None and body is not None and not attempt.is_hit:
            self.copy(attempt.call, status=status, body=body, exec_ms=attempt.exec_ms)

    def failed(self, call: Call, error: str, status: int) -> None:
        """Do nothing: a call without a response is not copied."""

    async def aclose(self) -> None:
        """Cancel all copies."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _compute_of(self, target: CallTarget) -> ShadowBudget:
        compute = self._computes.get(target.function_id)
        if compute is None:
            if len(self._computes) >= 4 * MAX_COPIES:
                self._computes = {
                    key: kept for key, kept in self._computes.items() if kept.reserved
                }
            compute = self._computes[target.function_id] = self._make_budget()
        return compute

    async def _run(self, copy: _Copy) -> None:
        """Run one copy, and report its outcome."""
        target, compute = copy.shadow.target, copy.compute
        try:
            reservation = self._slot(target)
            if reservation is None:
                self._observer.skipped(target)
                return
            call = _call_of(copy)
            self._tracer.shadow(call, copy.call)
            status, body = 502, None
            began_ns = call.reserved_ns = time.monotonic_ns()
            try:
                status, body = await _run_attempt(call, reservation)
            except _NOT_MADE:
                self._observer.skipped(target)
                return
            except (errors.PilotlightError, WorkerConnectionLost) as e:
                status = e.status if isinstance(e, errors.PilotlightError) else 502
                log.debug("copy failed call=%s error=%r", call.id, e)
            exec_ms = (time.monotonic_ns() - began_ns) / 1e6
            compute.add(self._clock(), copied=exec_ms)
            compute.ran(exec_ms)
            self._tracer.ended(
                call, reservation, None, status=status, dispatched_ns=began_ns, is_submitted=True
            )
            self._observer.shadowed(
                target, status=status, exec_ms=exec_ms, matched=_compared(copy, status, body)
            )
        finally:
            compute.end(copy.call.id)

    def _slot(self, target: CallTarget) -> Reservation | None:
        """Return a free slot; where there is no instance, start one for later copies, unless calls
        or starts wait for capacity."""
        if self._is_crowded():
            return None
        throttler = self._throttler_of(target)
        if throttler.is_retired:
            return None
        if not throttler.instances and not throttler.starting and throttler.health is None:
            throttler.start(1)
        return throttler.reserve_nowait()


def _call_of(copy: _Copy) -> Call:
    call, target = copy.call, copy.shadow.target
    return Call(
        id=f"{call.id}-shadow",
        target=target,
        method=call.method,
        payload=Payload(call.body, call.content_type, call.accept),
        caller=Caller(
            key_id="",
            accepts_pickle=call.caller.accepts_pickle and call.target.tenant == target.tenant,
            origin=call.caller.origin,
        ),
        choice=RoutingDecision(target, arm=SHADOW_ARM),
    )


async def _run_attempt(call: Call, reservation: Reservation) -> tuple[int, bytes | None]:
    """Send a copy to its instance. Returns its status and response body, None for a stream, which
    is not read.

    Raises PilotlightError, _NotRun, WorkerConnectionLost."""
    attempt = Attempt(call, reservation, is_shadow=True)
    try:
        check = call.target.check(call.method)
        if call.content_type is JSON:
            check.check(call.body)
        answer = await attempt.request_whole(await attempt.open())
    except BaseException as e:
        if isinstance(e, WorkerConnectionLost):
            reservation.throttler.drain(reservation.instance)
        attempt.fail(e, is_noted=False)
        if isinstance(e, WorkerConnectionLost) and not e.sent:
            raise _NotRun from e
        raise
    if answer.is_busy:
        attempt.refused_as_busy()
        raise _NotRun
    outcome = "ok" if answer.status < 400 or answer.body is None else "error"
    attempt.close(status=answer.status, outcome=outcome, bytes_out=len(answer.body or b""))
    return answer.status, answer.body


def _compared(copy: _Copy, status: int, body: bytes | None) -> bool | None:
    """Return whether the copy got the same response; None where they cannot be compared: a stream,
    a pickle, a body too large to parse."""
    if status != copy.status:
        return False
    if body is None or copy.call.content_type is not JSON:
        return None
    if max(len(body), len(copy.body)) > MAX_COMPARED_BYTES:
        return True if body == copy.body else None
    return is_same(copy.body, body)


def is_same(one: bytes, other: bytes) -> bool:
    """Return whether two responses are equal: byte for byte, or as JSON values with numbers within
    `json_compare.TOLERANCE`."""
    if one == other:
        return True
    try:
        return next(differences(json.loads(one), json.loads(other)), None) is None
    except (ValueError, RecursionError):
        return False
