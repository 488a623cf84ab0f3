"""The buffer in front of a revision's instances: assigns slots, queues waiting calls, requests
starts.

The mutable state is the calls that wait for a slot (`wait_queue.WaitQueue`); the base class
`instance_pool.InstancePool` has the instances and the starts in progress. All changes happen in
synchronous methods, which assign free slots to waiting calls before they return; there is no
`await` between a decision and its effect, so no lock is needed. Owner: the event loop.

A call that finds no free slot waits and requests starts: `start_estimates.starts_for_burst`
computes how many to begin, counting starting instances as capacity. The first instance does not
wait for an autoscaler tick."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from activator.balancing.global_queue import MAX_QUEUED, GlobalQueue
from activator.balancing.instance import WARM, Instance, Reservation
from activator.balancing.instance_lifecycle import (
    InstanceProvisioner,
    StartObserver,
    start_error_for_caller,
)
from activator.balancing.instance_pool import (
    InstancePool,
    ListenForCalls,
    OpenAccount,
    listen_to_none,
)
from activator.balancing.outlier_detection import (
    BAD,
    LatencyOutliers,
    RevisionHealth,
    is_function_fault,
    record_outcome,
)
from activator.balancing.start_estimates import is_start_needed, starts_for_burst
from activator.balancing.wait_queue import ConcurrencyMeter, EngineLoad, QueuedCall, WaitQueue
from activator.fairness.queue_priority import DEFAULT_RANK, QueueBound, QueuePriority
from activator.resilience.breaker import ANSWERED, BreakerTerms, Outcome
from activator.routing.route_table import CallTarget
from pilotlight import errors
from pilotlight.core.backoff import Backoff
from pilotlight.spec.identifiers import Priority
from snapshotter import errors as agent_errors
from snapshotter.types import InstanceInfo

log = logging.getLogger(__name__)

FIRST_START_PAUSE_S, MAX_START_PAUSE_S = 2.0, 60.0
"""Pauses of the autoscaler after failed starts in a row. A failed start costs its tenant CPU time,
and the next one mostly fails as well; a minute later a dependency of the function may be back."""


class Throttler(InstancePool):
    """One revision's slots, waiting calls and starts.

    Attributes:
        health: recent failures of the revision, and its breaker; None while there are none.
    """

    def __init__(
        self,
        target: CallTarget,
        *,
        provisioner: InstanceProvisioner,
        queue: GlobalQueue,
        observer: StartObserver,
        account: OpenAccount,
        terms: BreakerTerms = BreakerTerms(),  # noqa: B008  # frozen
        listen: ListenForCalls = listen_to_none,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            target,
            provisioner=provisioner,
            observer=observer,
            account=account,
            listen=listen,
            clock=clock,
        )
        self._terms = terms
        self.health: RevisionHealth | None = None
        self._made_at = clock()
        self._latency_outliers: LatencyOutliers | None = None
        self.load = ConcurrencyMeter(self._made_at)
        self._wait_queue = WaitQueue(queue=queue, load=self.load, clock=clock)
        self._recheck_timer: asyncio.TimerHandle | None = None
        self._start_backoff = Backoff(first_s=FIRST_START_PAUSE_S, max_s=MAX_START_PAUSE_S)
        self._paused_until = 0.0

    def __repr__(self) -> str:
        return (
            f"<Throttler {self.target.app}/{self.target.function}@{self.target.revision} "
            f"{len(self.instances)} instances, {self.starting} starting, {self.in_flight} in "
            f"flight, {len(self._wait_queue)} waiting>"
        )

    # -- slots -------------------------------------------------------------------------------------
    def reserve_nowait(
        self, affinity: int | None = None, *, now: float | None = None
    ) -> Reservation | None:
        """Return a free slot, or None when the call must wait. `affinity`: prefix of a language
        model's call (`llm.prefix_affinity`); `now`: where the clock was read already."""
        if now is None:
            now = self._clock()
        health = self.health
        if self._wait_queue.places or (health is not None and not health.breaker.admits(now)):
            return None
        instance = self._choose(now, affinity)
        if instance is None:
            return None
        if health is not None:
            health.breaker.record_start(now)
        load = self.load  # `ConcurrencyMeter.add`, inlined
        load.calls += 1
        load.held_s -= now
        load.last_call_at = now
        if load.calls > load.peak:  # noqa: PLR1730  # `max` takes three times as long
            load.peak = load.calls
        instance.in_flight += 1
        instance.held_s -= now
        return Reservation(self, instance, WARM, 0.0)

    def _choose(self, now: float, affinity: int | None = None) -> Instance | None:
        """Return the instance with a free slot and the fewest calls in flight; among equals the
        most recently used, so that the others become idle."""
        best: Instance | None = None
        for instance in self.instances.values():
            if (  # not `has_slot`, inlined
                instance.is_draining
                or instance.is_gone
                or instance.is_frozen
                or instance.in_flight >= instance.capacity
                or now < instance.blocked_until
            ):
                continue
            if best is None or instance.in_flight < best.in_flight:
                best = instance
                if not best.in_flight and best.capacity == 1:
                    return best
            elif instance.in_flight == best.in_flight and instance.idle_since > best.idle_since:
                best = instance
        return best

    async def reserve(
        self,
        timeout_s: float,
        rank: QueuePriority = DEFAULT_RANK,
        *,
        affinity: int | None = None,
        tokens: int = 0,
    ) -> Reservation:
        """Wait up to `timeout_s` for a slot, starting instances where needed. `affinity`, `tokens`:
        see `wait_queue.QueuedCall`.

        Raises TooManyRequests (queue full), DeadlineExceeded (clock `queue`), StartFailed,
        Unavailable, CircuitOpen. Cancelling it leaves the queue."""
        now = self._clock()
        reservation = self.reserve_nowait(affinity, now=now)
        if reservation is not None:
            return reservation
        if self.health is not None:
            self.health.require_admission(self.target, now)
        try:
            return await self._wait(timeout_s, rank, affinity, tokens, now)
        except BaseException as e:
            self._record_outcome("", Outcome.FAILED if is_function_fault(e) else Outcome.NEITHER)
            raise

    async def _wait(
        self, timeout_s: float, rank: QueuePriority, affinity: int | None, tokens: int, now: float
    ) -> Reservation:
        """Wait in the queue; at `now` no slot was free."""
        own = QueueBound(MAX_QUEUED, self.target.key, self.target.spec.scaling.max_queued)
        waiter = self._wait_queue.join(
            rank, (own, *rank.queued), patience_s=max(1.0, self.expected_start_s() or 1.0)
        )
        waiter.affinity, waiter.tokens = affinity, tokens
        self.request_scale_up(waiter.since)
        self._schedule_retry_when_unblocked(now)  # not of a later time, when a pause may be over
        timer = asyncio.get_running_loop().call_later(timeout_s, self._expire, waiter, timeout_s)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            self._cancel_wait(waiter)
            raise
        finally:
            timer.cancel()

    def release(self, instance: Instance, ending: Outcome = ANSWERED) -> None:
        """Free the slot of an ended call, and assign it to the next waiting call."""
        now = self._clock()
        if self.health is not None or ending is not ANSWERED:
            self._record_outcome(instance.id, ending)
        instance.in_flight -= 1
        instance.calls += 1
        instance.held_s += now
        load = self.load  # `ConcurrencyMeter.remove`, inlined
        load.calls -= 1
        load.held_s += now
        if not instance.in_flight:
            instance.idle_since = now
            if instance.is_draining and not instance.is_gone:
                self._stop(instance, "drained")
        if self._wait_queue.places:
            self._assign_free_slots(now)
        elif not instance.in_flight and any(self._gate.waiting):
            self._gate.on_instance_idle()

    def retry_slots(self) -> None:
        """Assign free slots again: an instance that was busy may be free."""
        self._assign_free_slots(self._clock())

    def _assign_free_slots(
        self, now: float, fresh: Instance | None = None, start_ms: float = 0.0
    ) -> None:
        while self._wait_queue.places:
            instance = fresh if fresh is not None and fresh.has_slot(now) else self._choose(now)
            if instance is None:
                self._schedule_retry_when_unblocked(now)
                return
            waiter = self._wait_queue.next()
            if waiter is None:
                return
            self._assign(waiter, instance, now, start_ms if instance is fresh else None)

    def _assign(
        self, waiter: QueuedCall, instance: Instance, now: float, start_ms: float | None
    ) -> None:
        """Give a waiting call a slot; `start_ms`: duration of the start that it waited for, None =
        none."""
        instance.in_flight += 1
        instance.held_s -= now
        if start_ms is None:
            waiter.future.set_result(Reservation(self, instance, WARM, 0.0))
        else:
            waited_ms = (now - waiter.since) * 1000
            waiter.future.set_result(
                Reservation(self, instance, instance.start_kind, min(waited_ms, start_ms))
            )

    def _schedule_retry_when_unblocked(self, now: float) -> None:
        until = min(
            (
                i.blocked_until
                for i in self.instances.values()
                if i.blocked_until > now and not i.is_gone
            ),
            default=None,
        )
        if until is not None:
            asyncio.get_running_loop().call_later(until - now, self.retry_slots)

    def _cancel_wait(self, waiter: QueuedCall) -> None:
        if (
            waiter.future.done()
            and not waiter.future.cancelled()
            and waiter.future.exception() is None
        ):
            # the slot was assigned at the same moment: it must not be lost
            waiter.future.result().release_unused()
            return
        self._wait_queue.leave(waiter)

    def _expire(self, waiter: QueuedCall, timeout_s: float) -> None:
        obstacle = self._lifecycle.obstacle()
        if obstacle is None or any(self.live()):
            message = (
                f"no instance of {self.target.app}/{self.target.function} was free within "
                f"{timeout_s:g} s"
            )
            obstacle = errors.DeadlineExceeded(message, clock="queue", retry_after_s=1)
        self._wait_queue.answer(waiter, obstacle)

    # -- health ------------------------------------------------------------------------------------
    def _record_outcome(self, instance_id: str, ending: Outcome) -> None:
        """Record the outcome of a call: tracking begins with the first failure, and ends after a
        period without one."""
        now = self._clock()
        self.health = record_outcome(self.health, self._terms, instance_id, ending, now)
        if (
            ending in BAD
            and self.health is not None
            and self.health.should_eject(instance_id, [one.id for one in self.live()], now)
        ):
            self._eject(self.instances[instance_id], "fails more than the others")

    def eject_slow_instance(self, now: float) -> None:
        """Eject an instance that has been much slower than the others for a while."""
        if self._latency_outliers is None:
            self._latency_outliers = LatencyOutliers(self._made_at)
        slow = self._latency_outliers.find_slow_instance(list(self.live()), now)
        if slow is not None:
            self._eject(slow, "slower than the others")

    def _eject(self, instance: Instance, why: str) -> None:
        """Drain an instance, and start another in its place if there is room."""
        log.warning("instance ejected instance=%s target=%r why=%s", instance.id, self.target, why)
        self.drain(instance)
        self.start(1)

    # -- starts ------------------------------------------------------------------------------------
    def request_scale_up(self, now: float) -> None:
        """Begin the starts that the waiting calls need; frozen instances are thawed first."""
        if len(self.frozen):
            self.frozen.thaw(self.instances.values(), len(self._wait_queue))
        start_s = self.expected_start_s()
        wanted = self._required_starts(start_s, self.call_s(now))
        self.start(wanted)
        if start_s is not None and self._recheck_timer is None and wanted < self._required_starts():
            self._recheck_timer = asyncio.get_running_loop().call_later(
                start_s, self._recheck_starts, start_s
            )

    def _required_starts(self, start_s: float | None = None, call_s: float | None = None) -> int:
        """Return the starts that the waiting calls need. Without both times: assume that running
        instances serve none of the waiting calls."""
        return starts_for_burst(
            waiting=len(self._wait_queue),
            free_slots=self.free_slots,
            starting_slots=self.starting * self.slots_each,
            max_inputs=self.slots_each,
            instances=len(self.instances) + self.starting,
            max_instances=self.target.spec.scaling.max_instances,
            running_slots=sum(one.capacity for one in self.live()),
            start_s=start_s,
            call_s=call_s,
        )

    def _recheck_starts(self, start_s: float) -> None:
        """Start instances for calls that still wait although running instances were expected to
        serve them first: a mean predicts little about a single call."""
        self._recheck_timer = None
        now = self._clock()
        if (self.oldest_wait_s(now) or 0.0) >= start_s:
            self.start(self._required_starts())
        else:
            self.request_scale_up(now)

    def start_failed(self, error: agent_errors.SnapshotterError) -> None:
        """A start ended without an instance."""
        log.warning("start failed target=%r code=%s error=%s", self.target, error.code, error)
        self._observer.start_failed(self.target, error.code)
        if self.on_awaited_start is not None:
            self.on_awaited_start(error.code)
        is_functions = isinstance(error, agent_errors.StartFailed | agent_errors.StartTimeout)
        if is_functions and not self.is_start_paused:  # of starts at once, the first
            self._paused_until = self._clock() + self._start_backoff.next_s()
        if any(self.live()) or self.starting:
            return  # live instances, or a start in progress, serve the waiting calls
        if isinstance(error, agent_errors.StartStopped):
            self.request_scale_up(
                self._clock()
            )  # the start was stopped for a reason unrelated to the waiting calls
            return
        self._wait_queue.fail(start_error_for_caller(self.target, error))

    @property
    def is_start_paused(self) -> bool:
        """Whether the function failed to start a moment ago, so that only calls start an
        instance."""
        return self._clock() < self._paused_until

    def add(self, info: InstanceInfo, began: float | None = None) -> None:
        """Add an instance as `InstancePool.add` does: the function starts, no pause is left."""
        self._start_backoff.reset()
        self._paused_until = 0.0
        super().add(info, began)

    def start_refused(self, error: errors.PilotlightError) -> None:
        """A start could not be requested: a secret is missing, a quota is used up, or the node is
        not for this tenant."""
        if any(self.live()) or self.asleep.waking:
            return  # live instances serve the waiting calls
        self._wait_queue.fail(error)

    @property
    def is_needed(self) -> bool:
        """Whether the last of the starts in progress is still needed."""
        if not self.is_retired and len(self.instances) < self.min_instances:
            return True
        if self.on_awaited_start is not None and not any(self.live()):
            return True
        now = self._clock()
        return is_start_needed(
            waiting=len(self._wait_queue),
            starting_slots=(self.starting - 1) * self.slots_each,
            running_slots=sum(one.capacity for one in self.live()),
            oldest_wait_s=self.oldest_wait_s(now) or 0.0,
            start_s=self.expected_start_s(),
            call_s=self.call_s(now),
            objective_s=self._wait_objective_s,
        )

    @property
    def _wait_objective_s(self) -> float | None:
        """As `autoscaler.decider.DeciderSpec.of`: a language model's is that of its first token."""
        spec = self.target.spec
        if spec.scaling.latency_objective_s is not None or spec.engine is None:
            return spec.scaling.latency_objective_s
        return None if spec.objectives is None else spec.objectives.first_token_s

    @property
    def priority(self) -> Priority:
        """The highest priority of the waiting calls."""
        return self._wait_queue.priority()

    # -- read by the autoscaler --------------------------------------------------------------------
    @property
    def waiting(self) -> int:
        """Number of calls without a slot."""
        return len(self._wait_queue)

    def oldest_wait_s(self, now: float) -> float | None:
        """Return how long the first call in the queue has waited; None when none waits."""
        return self._wait_queue.oldest_wait_s(now)

    def engine_load(self, now: float) -> EngineLoad | None:
        """Return the load that the engines of a language model report; None for other functions."""
        return None

    def call_s(self, now: float) -> float | None:
        """Return the mean time that calls hold a slot; None before the first has ended."""
        calls = sum(instance.calls for instance in self.instances.values())
        held_s = sum(
            instance.held_s + instance.in_flight * now for instance in self.instances.values()
        )
        return held_s / calls if calls else None

    @property
    def is_crowded(self) -> bool:
        """Whether starts of any function wait for room."""
        return any(self._gate.waiting)

    def set_desired_instances(self, wanted: int) -> None:
        """Set the number of instances that the autoscaler wants to keep; subclasses concentrate
        calls on them."""

    def refuse_waiting(
        self,
        error: errors.PilotlightError,
        is_refused: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Fail waiting calls with `error`: they will get no instance. `is_refused`: whether those
        of a calling tenant ("": of callers without a key)."""
        self._wait_queue.fail(error, is_refused)

    async def aclose(self) -> None:
        """Fail waiting calls, cancel starts, finish stops."""
        self._lifecycle.end_starts()
        if self._recheck_timer is not None:
            self._recheck_timer.cancel()
        self._wait_queue.fail(errors.Unavailable("the activator is shutting down", retry_after_s=1))
        await self.asleep.aclose()
        await self.frozen.aclose()
        await self._lifecycle.aclose()
