"""The load of one revision: its queue of calls that wait for a slot, the number of its waiting and
running calls over time, and what the engines of a language model report.

The queue orders calls, and answers each exactly once. A call is in the queue, or its future is done
(a slot, an error, or cancelled). Removing it from this queue also removes it from the process's
queue, in the same synchronous step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from activator.balancing.global_queue import GlobalQueue
from activator.balancing.instance import Reservation
from activator.fairness.fair_queue import Entry, FairQueue
from activator.fairness.queue_priority import QueueBound, QueuePriority
from pilotlight import errors
from pilotlight.spec.identifiers import Priority


class ConcurrencyMeter:
    """Counts calls over time. Owner: a Throttler, which adds and removes its running calls itself,
    for speed.

    Attributes:
        calls: number of calls now, waiting or running.
        held_s: seconds for which there were calls since it was last read, less the start times of
            those that are there: add `calls * now` to read it.
        peak: maximum of `calls` since it was last read.
        last_call_at: when the last call arrived, in the clock's seconds."""

    __slots__ = ("calls", "held_s", "last_call_at", "peak")

    def __init__(self, now: float) -> None:
        self.calls = self.peak = 0
        self.held_s = 0.0
        self.last_call_at = now

    def __repr__(self) -> str:
        return f"<ConcurrencyMeter {self.calls} calls>"

    def add(self, now: float) -> None:
        """Count an arriving call, waiting or running."""
        self.calls += 1
        self.held_s -= now
        self.last_call_at = now
        self.peak = max(self.peak, self.calls)

    def remove(self, now: float) -> None:
        """Count the end of a call, or that its caller left."""
        self.calls -= 1
        self.held_s += now

    def consume_average(self, now: float, elapsed_s: float) -> float:
        """Return the average number of calls since the previous call of this method, `elapsed_s`
        ago."""
        area, self.held_s = self.held_s + self.calls * now, -self.calls * now
        return area / elapsed_s if elapsed_s > 0 else float(self.calls)

    def consume_peak(self) -> int:
        """Return the maximum number of concurrent calls since the previous call of this method."""
        peak, self.peak = self.peak, self.calls
        return peak


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What the engines of a language model report; only ready instances whose engine answered.

    Attributes:
        slots: average concurrent calls of one instance, by its KV memory.
        queued_tokens: prompt tokens of the calls that wait, for a slot or inside an engine.
        tokens_per_s: prompt tokens that one instance processes, including generation: the recent
            peak; None = unknown.
        first_tokens: number of recent first tokens since the newest instance started.
        late: the share of them that exceeded the objective; None = there is no objective."""

    slots: float
    queued_tokens: int = 0
    tokens_per_s: float | None = None
    first_tokens: int = 0
    late: float | None = None


class QueuedCall:
    """One waiting call (`global_queue.QueuedItem`). Owner: its WaitQueue.

    Attributes:
        affinity, tokens: for a language model's call: see `llm.prefix_affinity`, and the estimated
            number of tokens of its prompt.
    """

    __slots__ = (
        "affinity",
        "bounds",
        "future",
        "line",
        "patience_s",
        "place",
        "rank",
        "since",
        "tokens",
    )

    def __init__(
        self,
        line: WaitQueue,
        rank: QueuePriority,
        bounds: Sequence[QueueBound],
        *,
        since: float,
        patience_s: float,
    ) -> None:
        self.line = line
        self.rank = rank
        self.bounds = bounds
        self.since = since
        self.patience_s = patience_s
        self.future: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        self.place: Entry[QueuedCall] | None = None
        self.affinity: int | None = None
        self.tokens = 0

    def __repr__(self) -> str:
        return f"<QueuedCall {self.rank.priority} {self.rank.tenant or '-'}>"

    def shed(self, error: errors.TooManyRequests) -> None:
        """Answer the call with `error` instead of a slot."""
        self.line.answer(self, error)


class WaitQueue:
    """The waiting calls of one revision. Owner: the Throttler.

    Attributes:
        places: read-only view of the queue entries.
    """

    def __init__(
        self, *, queue: GlobalQueue, load: ConcurrencyMeter, clock: Callable[[], float]
    ) -> None:
        self._queue = queue
        self._load = load
        self._clock = clock
        self._waiters: FairQueue[QueuedCall] = FairQueue()
        self.places: Mapping[Entry[QueuedCall], None] = self._waiters.places

    def __len__(self) -> int:
        return len(self._waiters)

    def __repr__(self) -> str:
        return f"<WaitQueue {self._waiters!r}>"

    def join(
        self, rank: QueuePriority, bounds: Sequence[QueueBound], *, patience_s: float
    ) -> QueuedCall:
        """Add a waiting call. Raises OverQuota, TooManyRequests or Shed when a limit is reached."""
        now = self._clock()
        waiter = QueuedCall(self, rank, bounds, since=now, patience_s=patience_s)
        self._queue.enter(waiter)
        waiter.place = self._waiters.push(waiter, rank, cost=rank.cost)
        self._load.add(now)
        return waiter

    def next(self) -> QueuedCall | None:
        """Remove and return the next call. It still counts as load, because it gets a slot."""
        while (waiter := self._waiters.pop()) is not None:
            self._queue.leave(waiter)
            if not waiter.future.done():
                return waiter
            self._load.remove(self._clock())  # cancelled at the same moment
        return None

    def leave(self, waiter: QueuedCall) -> bool:
        """Remove a call. Returns False when it was removed before."""
        if waiter.place is None or not self._waiters.remove(waiter.place):
            return False
        self._queue.leave(waiter)
        self._load.remove(self._clock())
        return True

    def answer(self, waiter: QueuedCall, error: errors.PilotlightError) -> None:
        """Answer a call with an error instead of a slot, unless it was answered before."""
        self.leave(waiter)
        if not waiter.future.done():
            waiter.future.set_exception(error)

    def fail(
        self,
        error: errors.PilotlightError,
        is_refused: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Answer all calls with this error, or those of the tenants that `is_refused` says."""
        for waiter in list(self._waiters):
            if is_refused(waiter.rank.tenant):
                self.answer(waiter, error)

    @property
    def tokens(self) -> int:
        """Prompt tokens of all waiting calls."""
        return sum(waiter.tokens for waiter in self._waiters)

    def oldest_wait_s(self, now: float) -> float | None:
        """Return the longest waiting time; None when no call waits."""
        oldest = self._waiters.oldest()
        return now - oldest.since if oldest is not None else None

    def priority(self) -> Priority:
        """Return the highest priority of the waiting calls; STANDARD when none waits."""
        first = self._waiters.first()
        return first.rank.priority if first is not None else Priority.STANDARD
