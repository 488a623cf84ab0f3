"""Gathers calls into batches: the only part of batching that has a clock, timers and tasks.

Calls gather in groups with the same batch key. A lane is the right to run a body; without
`@concurrent` there is one, so that one batch computes while the next one gathers. Whenever a lane
is free, `decide_release` evaluates each group, and the most urgent of those that are due is
released. A member that leaves before the release is removed from its batch; one that leaves later
is only not answered, and a batch without remaining members is stopped. Groups are evaluated once
per iteration of the event loop, so that calls which arrive together run together.

Times are `time.monotonic()`: the loop's own clock has a resolution of milliseconds, and is constant
within an iteration."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pilotlight.sdk.batches import WrongResults
from pilotlight.worker.batching.adaptive_wait import AdaptiveWait
from pilotlight.worker.batching.batch_key import BatchKey, batch_key_for
from pilotlight.worker.batching.groups import BatchedMethod, BatchGroup
from pilotlight.worker.batching.items import Asking, BatchItem, BatchShare, ReleasedBatch, enter
from pilotlight.worker.batching.release_policy import ReleaseReason, decide_release
from pilotlight.worker.batching.runner import BatchRunner
from pilotlight.worker.process.call_threads import CallThreads
from pilotlight.worker.user_code.spans import BatchSpans
from pilotlight.worker.user_code.target import Method

MAX_KINDS = 256
"""Number of batch keys whose adaptive wait is kept, least recently used evicted: the number of
shapes is unlimited."""


class RunningCalls:
    """A batch whose body is running."""

    __slots__ = ("body", "members", "task")

    def __init__(self, members: Sequence[BatchItem], body: BatchRunner) -> None:
        self.members = members
        self.body = body
        self.task: asyncio.Task[None] | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether any member still waits for it."""
        return any(member.is_there for member in self.members)


class Batcher:
    """Gathers the calls of an instance's batched methods. Owned by the event loop: no lock."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        *,
        max_inputs: int,
        threads: CallThreads,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._methods = {
            name: BatchedMethod(method, method.batch)
            for name, method in methods.items()
            if method.batch is not None
        }
        largest = max(
            (batched.policy.max_batch_size for batched in self._methods.values()), default=1
        )
        self._lanes = max(1, max_inputs // largest - 1)
        self._max_inputs = max_inputs
        self._threads = threads
        self._clock = clock
        self._groups: dict[BatchKey, BatchGroup] = {}
        self._running: set[RunningCalls] = set()
        self._known: OrderedDict[BatchKey, AdaptiveWait] = OrderedDict()
        self._waiting = 0
        self._timer: asyncio.Handle | None = None
        self._is_draining = False
        self._free_s, self._free_since = 0.0, 0.0

    def __repr__(self) -> str:
        return f"<Batcher waiting={self._waiting} running={len(self._running)}/{self._lanes}>"

    async def share(
        self,
        name: str,
        call: Asking,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        priority: bytes | None,
    ) -> BatchShare:
        """Run a call in a batch; returns its share. If cancelled, the call leaves: at once, or, as
        the last member of a running batch, when that has ended."""
        batched = self._methods[name]
        values = batched.lists.values(args, kwargs)
        now = self._clock()
        member = BatchItem(
            call=call,
            kind=batch_key_for(name, batched.policy, values, priority),
            values=values,
            came_at=now,
            free_s=self._free_clock(now),
            context=contextvars.copy_context(),
            future=asyncio.get_running_loop().create_future(),
        )
        self._join(batched, member, now)
        try:
            return await member.future
        except asyncio.CancelledError:
            await self._remove(member)
            raise

    def drain(self) -> None:
        """Stop waiting for further calls: none will arrive."""
        self._is_draining = True
        self._check()

    # -- waiting calls -----------------------------------------------------------------------------
    def _join(self, batched: BatchedMethod, member: BatchItem, now: float) -> None:
        group = self._groups.get(member.kind)
        if group is None:
            is_odd = self._is_odd(member.kind)
            group = self._groups[member.kind] = BatchGroup(
                member.kind, batched, self._patience(member.kind), is_odd=is_odd
            )
        group.joined_by(member, now, is_free=self._is_free)
        self._waiting += 1
        self._schedule_check()

    async def _remove(self, member: BatchItem) -> None:
        group = self._groups.get(member.kind)
        if group is not None and member in group.members:
            group.left_by(member)
            self._waiting -= 1
            if not group.members:
                del self._groups[member.kind]
            return
        running = next((one for one in self._running if member in one.members), None)
        if running is not None and running.task is not None and not running.is_wanted:
            running.body.stop()
            await asyncio.wait([running.task])

    def _is_odd(self, kind: BatchKey) -> bool:
        return kind not in self._known and any(other[:3] == kind[:3] for other in self._known)

    def _patience(self, kind: BatchKey) -> AdaptiveWait:
        patience = self._known.setdefault(kind, AdaptiveWait())
        self._known.move_to_end(kind)
        if len(self._known) > MAX_KINDS:
            self._known.popitem(last=False)
        return patience

    # -- release -----------------------------------------------------------------------------------
    @property
    def _is_free(self) -> bool:
        return len(self._running) < self._lanes

    def _free_clock(self, now: float) -> float:
        """Total seconds during which a lane was free: calls that waited in that time waited for
        other calls."""
        return self._free_s + (now - self._free_since if self._is_free else 0.0)

    def _schedule_check(self) -> None:
        self._arm(asyncio.get_running_loop().call_soon(self._check))

    def _arm(self, timer: asyncio.Handle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def _check(self) -> None:
        """Release the groups that are due, and schedule the next evaluation."""
        self._arm(None)
        now = self._clock()
        while self._is_free and self._groups:
            again_at = float("inf")
            due: list[tuple[BatchGroup, ReleaseReason]] = []
            can_grow, free_s = self._waiting < self._max_inputs, self._free_clock(now)
            for group in self._groups.values():
                verdict = decide_release(
                    now,
                    group.seen(
                        now, free_s=free_s, can_grow=can_grow, is_draining=self._is_draining
                    ),
                    group.batched.policy,
                )
                again_at = min(again_at, verdict.look_again_at)
                if verdict.reason is not None:
                    due.append((group, verdict.reason))
            if not due:
                self._arm(asyncio.get_running_loop().call_later(again_at - now, self._check))
                return
            group, reason = min(due, key=lambda one: one[0].urgency(now))
            self._let_go(group, reason, now)

    def _let_go(self, group: BatchGroup, reason: ReleaseReason, now: float) -> None:
        members = group.take(now)
        self._waiting -= len(members)
        if not group.members:
            del self._groups[group.kind]
        release = ReleasedBatch(
            members=members, at=now, reason=reason, free_s=self._free_clock(now)
        )
        running = RunningCalls(
            members, BatchRunner(group.batched.method, group.batched.lists, self._threads)
        )
        self._running.add(running)
        if not self._is_free:
            self._free_s += now - self._free_since
            for waiting in self._groups.values():
                waiting.lose_lane(now)
        running.task = asyncio.get_running_loop().create_task(
            self._compute(group, running, release), name="batch"
        )

    # -- running batches ---------------------------------------------------------------------------
    async def _compute(
        self, group: BatchGroup, running: RunningCalls, release: ReleasedBatch
    ) -> None:
        try:
            await self._answer_all(group, running, release)
        except BaseException as e:
            for member in running.members:  # a bug of ours: no member may wait for ever
                if not member.future.done():
                    member.future.set_exception(
                        RuntimeError(f"the batch failed without an answer: {e!r}")
                    )
            raise
        finally:
            now = self._clock()
            was_free = self._is_free
            self._running.discard(running)
            if not was_free:
                self._free_since = now
                for waiting in self._groups.values():
                    waiting.silent_since = now
            self._check()

    async def _answer_all(
        self, group: BatchGroup, running: RunningCalls, release: ReleasedBatch
    ) -> None:
        members, policy = release.members, group.batched.policy
        spans = BatchSpans([member.call.spans for member in members])
        context = contextvars.copy_context()
        context.run(enter, members, spans)
        began = self._clock()
        ok, value = await running.body.run([member.values for member in members], context)
        compute_s = self._clock() - began
        spans.finish(
            size=len(members),
            reason=release.reason.value,
            members=",".join(member.call.id for member in members),
        )
        for member in members:
            member.call.spans.share(spans)
        if ok:
            group.batched.cost(group.kind.bucket).note(len(members), compute_s)
            results = [(not isinstance(one, Exception), one) for one in value]
        elif (
            len(members) > 1
            and policy.retry_alone
            and isinstance(value, Exception)
            and not isinstance(value, WrongResults)
        ):
            await self._answer_each(running, release)
            return
        else:
            results = [(False, value)] * len(members)
        is_first = True
        for member, (is_ok, result) in zip(members, results, strict=True):
            if member.is_there:
                line = release.line(
                    member,
                    size=len(members),
                    compute_s=compute_s,
                    reason=release.reason,
                    is_first=is_first,
                )
                member.future.set_result(BatchShare(ok=is_ok, value=result, line=line))
                is_first = False

    async def _answer_each(self, running: RunningCalls, release: ReleasedBatch) -> None:
        """Run each call alone, once: only those that raise fail."""
        for member in release.members:
            if member.is_there:
                began = self._clock()
                ok, value = await running.body.run([member.values], member.context)
                if member.is_there:
                    result = value[0] if ok else value
                    is_ok = ok and not isinstance(result, Exception)
                    line = release.line(
                        member,
                        size=1,
                        compute_s=self._clock() - began,
                        reason=ReleaseReason.RETRIED,
                        is_first=True,
                    )
                    member.future.set_result(BatchShare(ok=is_ok, value=result, line=line))
