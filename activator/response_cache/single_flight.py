"""Equal calls at the same time: one runs, the others wait for its answer.

What follows the run decides for those that wait: an answer that can be stored is given to all; an
answer that cannot be (a stream, a large one) lets all run; a failure lets one run, which the others
wait for then. So no failure is shared, and a function that fails is not called by all at once.

A waiting call counts in every bound of the queue, may be shed, and has the queue's clock."""

from __future__ import annotations

import asyncio
import enum
from collections import OrderedDict

from activator.balancing.global_queue import MAX_QUEUED, GlobalQueue
from activator.calls.call import Call
from activator.calls.response_store import StoredResponse
from activator.fairness.queue_priority import QueueBound, QueuePriority
from pilotlight import errors


class Turn(enum.Enum):
    """What a call does that has no answer. LEAD: run, and report it (`complete`,
    `complete_unshared` or `fail`). ALONE: run."""

    LEAD = "lead"
    ALONE = "alone"


class Follower:
    """A call that waits for an equal one (`global_queue.QueuedItem`)."""

    __slots__ = ("bounds", "future", "patience_s", "rank")

    def __init__(self, rank: QueuePriority, bounds: tuple[QueueBound, ...]) -> None:
        self.rank = rank
        self.bounds = bounds
        self.patience_s = 1.0
        self.future: asyncio.Future[StoredResponse | Turn] = (
            asyncio.get_running_loop().create_future()
        )

    def __repr__(self) -> str:
        return f"<Follower {self.rank.priority} {self.rank.tenant or '-'}>"

    def shed(self, error: errors.TooManyRequests) -> None:
        """Answer the call with `error`."""
        self.refuse(error)

    def refuse(self, error: errors.PilotlightError) -> None:
        """Answer the call with `error`, unless it was answered before."""
        if not self.future.done():
            self.future.set_exception(error)


class SingleFlight:
    """The running calls by their keys, and those that wait for them. Owner: the event loop."""

    def __init__(self, queue: GlobalQueue) -> None:
        self._queue = queue
        self._flights: dict[bytes, OrderedDict[Follower, None]] = {}

    def __repr__(self) -> str:
        return f"<SingleFlight {len(self._flights)} calls, {self.waiting} wait for them>"

    @property
    def waiting(self) -> int:
        """Number of calls that wait."""
        return sum(map(len, self._flights.values()))

    async def join(self, key: bytes, call: Call) -> StoredResponse | Turn:
        """Return LEAD for the first call of a key; wait for it otherwise.

        Raises OverQuota, TooManyRequests, DeadlineExceeded (clock `queue`)."""
        followers = self._flights.get(key)
        if followers is None:
            self._flights[key] = OrderedDict()
            return Turn.LEAD
        spec, rank = call.target.spec, call.caller.rank
        own = QueueBound(MAX_QUEUED, call.target.key, spec.scaling.max_queued)
        follower = Follower(rank, (own, *rank.queued))
        self._queue.enter(follower)
        followers[follower] = None
        limit_s = call.remaining_s(spec.clocks.queue_s)
        timer = asyncio.get_running_loop().call_later(
            max(0.0, limit_s), follower.refuse, _too_late(call, limit_s)
        )
        try:
            return await follower.future
        except asyncio.CancelledError:
            if _leads(follower):
                self.fail(key)
            raise
        finally:
            timer.cancel()
            self._queue.leave(follower)
            followers.pop(follower, None)

    def complete(self, key: bytes, response: StoredResponse) -> None:
        """The leading call has an answer that all get."""
        self._answer_all(key, response)

    def complete_unshared(self, key: bytes) -> None:
        """The leading call has an answer that only its caller gets."""
        self._answer_all(key, Turn.ALONE)

    def fail(self, key: bytes) -> None:
        """The leading call has none: the next one leads."""
        followers = self._flights[key]
        while followers:
            follower, _ = followers.popitem(last=False)
            if not follower.future.done():
                follower.future.set_result(Turn.LEAD)
                return
        del self._flights[key]

    def _answer_all(self, key: bytes, answer: StoredResponse | Turn) -> None:
        for follower in self._flights.pop(key):
            if not follower.future.done():
                follower.future.set_result(answer)


def _leads(follower: Follower) -> bool:
    future = follower.future
    return (
        future.done()
        and not future.cancelled()
        and future.exception() is None
        and future.result() is Turn.LEAD
    )


def _too_late(call: Call, limit_s: float) -> errors.DeadlineExceeded:
    return errors.DeadlineExceeded(
        f"an equal call of {call.target.app}/{call.target.function} was not answered within "
        f"{limit_s:g} s",
        clock="queue",
        retry_after_s=1,
    )
