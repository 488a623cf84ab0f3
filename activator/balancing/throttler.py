"""The buffer before a revision's instances: hands out slots, holds the calls that wait, asks for
starts.

The mutable state is the calls that wait for a slot (`wait_queue.WaitQueue`); the instances and the
starts under way are `instance_pool.InstancePool`, the other half of the same object. Every change
happens in one of the synchronous methods, which hand free slots to waiters before they return; no
`await` stands between a decision and its effect, so no lock is needed. Owner: the event loop.

A call that finds no free slot waits, and pokes: how many starts to begin right now is
`burst.instances_now`, which counts instances that are starting as capacity. No tick stands between
a call and the first instance."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from activator.autoscaler.burst import instances_now
from activator.autoscaler.concurrency_meter import ConcurrencyMeter
from activator.autoscaler.observation import EngineLoad
from activator.balancing.admission import MAX_QUEUED, GlobalQueue
from activator.balancing.fleet import Fleet
from activator.balancing.instance import Instance, least_loaded
from activator.balancing.instance_lifecycle import StartObserver, start_error_for_caller
from activator.balancing.instance_pool import InstancePool
from activator.balancing.reservation import WARM, Reservation
from activator.balancing.wait_queue import QueuedCall, WaitQueue
from activator.billing.instance_meter import InstanceAccount
from activator.coordination.state import InstanceLeases
from activator.fairness.queue_priority import DEFAULT_RANK, QueueBound, QueuePriority
from activator.fairness.start_admission import StartAdmission
from activator.resilience.breaker import ANSWERED, BreakerTerms, Outcome
from activator.resilience.outlier_detection import (
    BAD,
    LatencyOutliers,
    RevisionHealth,
    is_its_own,
    noted,
)
from activator.routing.route_table import CallTarget
from pilotlight import errors
from pilotlight.types import Priority
from snapshotter import errors as agent_errors

log = logging.getLogger(__name__)


class Throttler(InstancePool):
    """One revision's slots, waiters and starts. `allowance`: None when this activator is the only
    one; `gate`: None lets every start go.

    Attributes:
        health: what speaks against the revision, its breaker; None while nothing does.
    """

    def __init__(
        self,
        target: CallTarget,
        *,
        fleet: Fleet,
        queue: GlobalQueue,
        secret_env: Callable[[CallTarget], dict[str, str]],
        observer: StartObserver,
        account: Callable[[CallTarget, str], InstanceAccount],
        allowance: InstanceLeases | None = None,
        gate: StartAdmission | None = None,
        terms: BreakerTerms = BreakerTerms(),  # noqa: B008  # frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            target,
            fleet=fleet,
            secret_env=secret_env,
            observer=observer,
            account=account,
            allowance=allowance,
            gate=gate,
            clock=clock,
        )
        self._terms = terms
        self.health: RevisionHealth | None = None
        self._pace = LatencyOutliers(clock())
        self.load = ConcurrencyMeter(clock)
        self._line = WaitQueue(queue=queue, load=self.load, clock=clock)
        self._second_look: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return (
            f"<Throttler {self.target.app}/{self.target.function}@{self.target.revision} "
            f"{len(self.instances)} instances, {self.starting} starting, {self.in_flight} in "
            f"flight, {len(self._line)} waiting>"
        )

    # -- slots -------------------------------------------------------------------------------------
    def reserve_nowait(self, affinity: int | None = None) -> Reservation | None:
        """A free slot, or None when the call must wait. `affinity`: of a language model's call
        (`llm.prefix_affinity`)."""
        now = self._clock()
        health = self.health
        if self._line.places or (health is not None and not health.breaker.admits(now)):
            return None
        instance = least_loaded(self.instances.values(), now)
        if instance is None:
            return None
        if health is not None:
            health.breaker.go(now)
        self.load.add(now)
        instance.in_flight += 1
        instance.held_s -= now
        return Reservation(self, instance, WARM, 0.0)

    async def reserve(
        self,
        timeout_s: float,
        rank: QueuePriority = DEFAULT_RANK,
        *,
        affinity: int | None = None,
        tokens: int = 0,
    ) -> Reservation:
        """A slot within `timeout_s`, starting instances where that helps. `affinity`, `tokens`: see
        `wait_queue.QueuedCall`.

        Raises TooManyRequests (queue full), DeadlineExceeded (clock `queue`), StartFailed,
        Unavailable, CircuitOpen. Cancelling it leaves the queue."""
        reservation = self.reserve_nowait(affinity)
        if reservation is not None:
            return reservation
        if self.health is not None:
            self.health.let_wait(self.target, self._clock())
        try:
            return await self._wait(timeout_s, rank, affinity, tokens)
        except BaseException as e:
            self._note("", Outcome.FAILED if is_its_own(e) else Outcome.NEITHER)
            raise

    async def _wait(
        self, timeout_s: float, rank: QueuePriority, affinity: int | None, tokens: int
    ) -> Reservation:
        own = QueueBound(MAX_QUEUED, self.target.key, self.target.spec.scaling.max_queued)
        waiter = self._line.join(
            rank, (own, *rank.queued), patience_s=max(1.0, self.expected_start_s() or 1.0)
        )
        waiter.affinity, waiter.tokens = affinity, tokens
        self.poke(waiter.since)
        self._look_again_when_unblocked(waiter.since)
        timer = asyncio.get_running_loop().call_later(timeout_s, self._expire, waiter, timeout_s)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            self._give_up(waiter)
            raise
        finally:
            timer.cancel()

    def release(self, instance: Instance, ending: Outcome = ANSWERED) -> None:
        """A call ended: its slot goes to the one who waits longest."""
        now = self._clock()
        if self.health is not None or ending is not ANSWERED:
            self._note(instance.id, ending)
        instance.in_flight -= 1
        instance.calls += 1
        instance.held_s += now
        self.load.remove(now)
        if not instance.in_flight:
            instance.idle_since = now
            if instance.is_draining and not instance.is_gone:
                self._stop(instance, "drained")
        if self._line.places:
            self._hand_out(now)
        elif not instance.in_flight and self._gate.has_waiting_starts:
            self._gate.on_instance_idle()

    def retry_slots(self) -> None:
        """Look again: an instance that was busy may be free."""
        self._hand_out(self._clock())

    def _hand_out(self, now: float, fresh: Instance | None = None, start_ms: float = 0.0) -> None:
        while self._line.places:
            instance = (
                fresh
                if fresh is not None and fresh.has_slot(now)
                else least_loaded(self.instances.values(), now)
            )
            if instance is None:
                self._look_again_when_unblocked(now)
                return
            waiter = self._line.next()
            if waiter is None:
                return
            self._give(waiter, instance, now, start_ms if instance is fresh else None)

    def _give(
        self, waiter: QueuedCall, instance: Instance, now: float, start_ms: float | None
    ) -> None:
        """A slot for one who waits; `start_ms`: of the start that it waited for, None = of none."""
        instance.in_flight += 1
        instance.held_s -= now
        if start_ms is None:
            waiter.future.set_result(Reservation(self, instance, WARM, 0.0))
        else:
            waited_ms = (now - waiter.since) * 1000
            waiter.future.set_result(
                Reservation(self, instance, instance.start_kind, min(waited_ms, start_ms))
            )

    def _look_again_when_unblocked(self, now: float) -> None:
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

    def _give_up(self, waiter: QueuedCall) -> None:
        if (
            waiter.future.done()
            and not waiter.future.cancelled()
            and waiter.future.exception() is None
        ):
            # the slot came in the same moment: it must not be lost
            waiter.future.result().give_back()
            return
        self._line.leave(waiter)

    def _expire(self, waiter: QueuedCall, timeout_s: float) -> None:
        obstacle = self._comings.obstacle()
        if obstacle is None or any(self.live()):
            message = (
                f"no instance of {self.target.app}/{self.target.function} was free within "
                f"{timeout_s:g} s"
            )
            obstacle = errors.DeadlineExceeded(message, clock="queue", retry_after_s=1)
        self._line.answer(waiter, obstacle)

    # -- what speaks against it --------------------------------------------------------------------
    def _note(self, instance_id: str, ending: Outcome) -> None:
        """How a call ended: watching begins with the first failure, and ends when all is well
        again."""
        now = self._clock()
        self.health = noted(self.health, self._terms, instance_id, ending, now)
        if (
            ending in BAD
            and self.health is not None
            and self.health.should_eject(instance_id, [one.id for one in self.live()], now)
        ):
            self._eject(self.instances[instance_id], "fails more than the others")

    def look_for_slow(self, now: float) -> None:
        """Leave an instance that has been much slower than its siblings for a while."""
        slow = self._pace.look(list(self.live()), now)
        if slow is not None:
            self._eject(slow, "slower than the others")

    def _eject(self, instance: Instance, why: str) -> None:
        """No more calls for it; another comes in its place, where there is room for one."""
        log.warning("instance ejected instance=%s target=%r why=%s", instance.id, self.target, why)
        self.drain(instance)
        self.start(1)

    # -- starts ------------------------------------------------------------------------------------
    def poke(self, now: float) -> None:
        """Begin the starts that the waiting calls need now; what is frozen is thawed before
        anything is started."""
        if len(self.frozen):
            self.frozen.thaw(self.instances.values(), len(self._line))
        start_s = self.expected_start_s()
        wanted = self._starts_wanted(start_s, self.call_s(now))
        self.start(wanted)
        if start_s is not None and self._second_look is None and wanted < self._starts_wanted():
            self._second_look = asyncio.get_running_loop().call_later(
                start_s, self._look_twice, start_s
            )

    def _starts_wanted(self, start_s: float | None = None, call_s: float | None = None) -> int:
        """Without both times: none of the calls that wait is expected to be served by what runs."""
        return instances_now(
            waiting=len(self._line),
            free_slots=self.free_slots,
            starting_slots=self.starting * self.slots_each,
            max_inputs=self.slots_each,
            instances=len(self.instances) + self.starting,
            max_instances=self.target.spec.scaling.max_instances,
            running_slots=sum(one.capacity for one in self.live()),
            start_s=start_s,
            call_s=call_s,
        )

    def _look_twice(self, start_s: float) -> None:
        """Whoever was to be served before a start could help, and waits after all, gets one: the
        mean says little of a single call."""
        self._second_look = None
        now = self._clock()
        if (self.oldest_wait_s(now) or 0.0) >= start_s:
            self.start(self._starts_wanted())
        else:
            self.poke(now)

    def start_failed(self, error: agent_errors.SnapshotterError) -> None:
        """A start ended without an instance."""
        log.warning("start failed target=%r code=%s error=%s", self.target, error.code, error)
        self._observer.start_failed(self.target, error.code)
        if any(self.live()) or self.starting:
            return  # the calls that wait are served by what is there, or by a start still under way
        if isinstance(error, agent_errors.StartStopped):
            self.poke(self._clock())  # whoever stopped it had nothing against the calls that wait
            return
        self._line.fail(start_error_for_caller(self.target, error))

    def start_refused(self, error: errors.PilotlightError) -> None:
        """A start could not even be asked for: a secret is missing, a quota is used up, the node is
        not for this tenant."""
        if any(self.live()) or self.asleep.waking:
            return  # the calls that wait are served by what is there
        self._line.fail(error)

    @property
    def is_needed(self) -> bool:
        """See starts.Owner."""
        if not self.is_retired and len(self.instances) < self.min_instances:
            return True
        if self.is_awaited and not any(self.live()):
            return True
        return len(self._line) > (self.starting - 1) * self.slots_each

    @property
    def priority(self) -> Priority:
        """See starts.Owner."""
        return self._line.priority()

    # -- what the autoscaler reads -----------------------------------------------------------------
    @property
    def waiting(self) -> int:
        """Calls without a slot."""
        return len(self._line)

    def oldest_wait_s(self, now: float) -> float | None:
        """How long the first in the queue has waited; None when nobody does."""
        return self._line.oldest_wait_s(now)

    def engine_load(self, now: float) -> EngineLoad | None:
        """What the engines of a language model say; None of other functions."""
        return None

    def call_s(self, now: float) -> float | None:
        """Mean time that calls hold a slot; None before the first has ended."""
        calls = sum(instance.calls for instance in self.instances.values())
        held_s = sum(
            instance.held_s + instance.in_flight * now for instance in self.instances.values()
        )
        return held_s / calls if calls else None

    @property
    def is_crowded(self) -> bool:
        """Whether starts wait for room, of whatever function."""
        return self._gate.has_waiting_starts

    def settle_on(self, wanted: int) -> None:
        """The autoscaler wants to keep so many instances: where calls are kept together, they are
        by this."""

    def refuse_waiting(self, error: errors.PilotlightError) -> None:
        """Answer those who wait: nothing will come for them."""
        self._line.fail(error)

    async def aclose(self) -> None:
        """Give up: waiters are told, starts abandoned, stops finished."""
        if self._second_look is not None:
            self._second_look.cancel()
        self._line.fail(errors.Unavailable("the activator is shutting down", retry_after_s=1))
        await self.asleep.aclose()
        await self.frozen.aclose()
        await self._comings.aclose()
