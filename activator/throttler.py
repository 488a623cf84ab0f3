"""The buffer before a revision's instances: hands out slots, holds the calls that wait, asks for starts.

The mutable state is: the instances, the calls that wait for a slot (`waiting.Line`), and the starts under way. Every change happens in
one of the synchronous methods, which hand free slots to waiters before they return; no `await` stands between a decision and its effect,
so no lock is needed. What takes time, bringing instances up and ending them, is `starts.Comings`. Owner: the event loop.

A call that finds no free slot waits, and pokes: how many starts to begin right now is `poke.instances_now`, which counts instances that are
starting as capacity. No tick stands between a call and the first instance.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator

from activator.admission import MAX_QUEUED, ProcessQueue
from activator.autoscaler.poke import instances_now
from activator.autoscaler.rungs import StartTimes
from activator.billing.account import InstanceAccount
from activator.fairness.gate import Gate
from activator.fairness.rank import DEFAULT_RANK, QueueBound, Rank
from activator.fleet import Fleet
from activator.instances import Instance, least_loaded
from activator.load import Load
from activator.reservation import WARM, Reservation
from activator.resilience.breaker import ANSWERED, BreakerTerms, Ending
from activator.resilience.health import BAD, Health, Pace, is_its_own, noted
from activator.routes import Target
from activator.shared.state import Allowance, Want
from activator.starts import Comings, StartObserver, as_answer
from activator.surplus import Generosity
from activator.waiting import Line, Waiter
from pilotlight import errors
from pilotlight.types import Priority
from snapshotter import errors as agent_errors
from snapshotter.types import InstanceInfo

log = logging.getLogger(__name__)


class Throttler:
    """One revision's slots, waiters and starts. `allowance`: None when this activator is the only one; `gate`: None lets every start go.

    Attributes:
        is_retired: no traffic any more.
        is_kept: False while its budget is spent: `min_instances` keeps nothing.
        health: what speaks against the revision, its breaker; None while nothing does.
    """

    def __init__(
        self,
        target: Target,
        *,
        fleet: Fleet,
        queue: ProcessQueue,
        secret_env: Callable[[Target], dict[str, str]],
        observer: StartObserver,
        account: Callable[[Target, str], InstanceAccount],
        allowance: Allowance | None = None,
        gate: Gate | None = None,
        terms: BreakerTerms = BreakerTerms(),  # noqa: B008  # frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.target = target
        self._allowance = allowance
        self._generosity = Generosity()
        self._terms = terms
        self.health: Health | None = None
        self._pace = Pace(clock())
        self._observer = observer
        self._account = account
        self._clock = clock
        self.instances: dict[str, Instance] = {}
        self.load = Load(clock)
        self._line = Line(queue=queue, load=self.load, clock=clock)
        self._gate = gate or Gate(clock=clock)
        self._comings = Comings(
            target, fleet=fleet, secret_env=secret_env, allowance=allowance, gate=self._gate, owner=self, clock=clock
        )  # fmt: skip
        self.start_times = StartTimes()
        self.is_retired = False
        self.is_kept = True

    def __repr__(self) -> str:
        return (
            f"<Throttler {self.target.app}/{self.target.function}@{self.target.revision} "
            f"{len(self.instances)} instances, {self._comings.starting} starting, {self.in_flight} in flight, {len(self._line)} waiting>"
        )

    def retarget(self, target: Target) -> None:
        """The same revision was told anew: starts from now on launch what `target` says (whether it may be kept on disk, its prices, …)."""
        is_other = target.launch != self.target.launch or target.rates != self.target.rates
        self.target = target
        if is_other:
            self._comings.retarget(target)

    # -- slots --------------------------------------------------------------------------------------------------------
    def reserve_nowait(self) -> Reservation | None:
        """A free slot, or None when the call must wait."""
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

    async def reserve(self, timeout_s: float, rank: Rank = DEFAULT_RANK) -> Reservation:
        """A slot within `timeout_s`, starting instances where that helps.

        Raises TooManyRequests (queue full), DeadlineExceeded (clock `queue`), StartFailed, Unavailable, CircuitOpen. Cancelling it leaves
        the queue.
        """
        reservation = self.reserve_nowait()
        if reservation is not None:
            return reservation
        if self.health is not None:
            self.health.let_wait(self.target, self._clock())
        try:
            return await self._wait(timeout_s, rank)
        except BaseException as e:
            self._note("", Ending.FAILED if is_its_own(e) else Ending.NEITHER)
            raise

    async def _wait(self, timeout_s: float, rank: Rank) -> Reservation:
        own = QueueBound(MAX_QUEUED, self.target.key, self.target.spec.scaling.max_queued)
        waiter = self._line.join(rank, (own, *rank.queued), patience_s=max(1.0, self.expected_start_s() or 1.0))
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

    def release(self, instance: Instance, ending: Ending = ANSWERED) -> None:
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
        elif not instance.in_flight and self._gate.is_crowded:
            self._gate.idle()

    def retry_slots(self) -> None:
        """Look again: an instance that was busy may be free."""
        self._hand_out(self._clock())

    def _hand_out(self, now: float, fresh: Instance | None = None, start_ms: float = 0.0) -> None:
        while self._line.places:
            instance = fresh if fresh is not None and fresh.has_slot(now) else least_loaded(self.instances.values(), now)
            if instance is None:
                self._look_again_when_unblocked(now)
                return
            waiter = self._line.next()
            if waiter is None:
                return
            instance.in_flight += 1
            instance.held_s -= now
            kind = WARM if instance is not fresh else instance.start_kind
            waited_ms = (now - waiter.since) * 1000
            waiter.future.set_result(Reservation(self, instance, kind, min(waited_ms, start_ms) if instance is fresh else 0.0))

    def _look_again_when_unblocked(self, now: float) -> None:
        until = min((i.blocked_until for i in self.instances.values() if i.blocked_until > now and not i.is_gone), default=None)
        if until is not None:
            asyncio.get_running_loop().call_later(until - now, self.retry_slots)

    def _give_up(self, waiter: Waiter) -> None:
        if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
            waiter.future.result().give_back()  # the slot came in the same moment: it must not be lost
            return
        self._line.leave(waiter)

    def _expire(self, waiter: Waiter, timeout_s: float) -> None:
        obstacle = self._comings.obstacle()
        if obstacle is None or any(self.live()):
            message = f"no instance of {self.target.app}/{self.target.function} was free within {timeout_s:g} s"
            obstacle = errors.DeadlineExceeded(message, clock="queue", retry_after_s=1)
        self._line.answer(waiter, obstacle)

    # -- what speaks against it ---------------------------------------------------------------------------------------
    def _note(self, instance_id: str, ending: Ending) -> None:
        """How a call ended: watching begins with the first failure, and ends when all is well again."""
        now = self._clock()
        self.health = noted(self.health, self._terms, instance_id, ending, now)
        if ending in BAD and self.health is not None and self.health.should_eject(instance_id, [one.id for one in self.live()], now):
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

    # -- starts and stops ---------------------------------------------------------------------------------------------
    def poke(self, now: float) -> None:
        """Begin the starts that the waiting calls need now."""
        scaling = self.target.spec.scaling
        wanted = instances_now(
            waiting=len(self._line),
            free_slots=sum(i.capacity - i.in_flight for i in self.live()),
            starting_slots=self._comings.starting * scaling.max_inputs,
            max_inputs=scaling.max_inputs,
            instances=len(self.instances) + self._comings.starting,
            max_instances=scaling.max_instances,
        )
        self.start(wanted)

    def start(self, count: int) -> None:
        """Begin `count` starts, within max_instances."""
        room = self.target.spec.scaling.max_instances - self._comings.starting - len(self.instances)
        self._comings.start(min(count, room))

    def add(self, info: InstanceInfo, began: float | None = None) -> None:
        """An instance is ready (or was adopted): its slots go to those who wait."""
        now = self._clock()
        instance = Instance(info, account=self._account(self.target, info.id), capacity=self.target.spec.scaling.max_inputs, now=now)
        self.instances[instance.id] = instance
        start_s = now - began if began is not None else 0.0
        if began is None:
            self._comings.adopted(instance.id)
        else:
            self._started(instance, start_s)
        self._hand_out(now, instance, start_s * 1000)
        if self.is_retired:
            self.drain(instance)

    def _started(self, instance: Instance, start_s: float) -> None:
        """Remember what the start took: bytes come to a node once, whatever rung waits for them; a place is waited for by who is late."""
        info = instance.info
        own_s = max(0.0, start_s - info.phases_ms.get("weights", 0.0) / 1000)
        self.start_times.took(info.start_kind, own_s, info.phases_ms.keys())
        self._observer.instance_ready(self.target, info, start_s)
        billed_s = max(0.0, start_s - info.phases_ms.get("queue", 0.0) / 1000)
        instance.account.started(start_kind=info.start_kind.value, billed_ns=int(billed_s * 1e9), at_ns=time.time_ns())

    def start_failed(self, error: agent_errors.SnapshotterError) -> None:
        """A start ended without an instance."""
        log.warning("start failed target=%r code=%s error=%s", self.target, error.code, error)
        self._observer.start_failed(self.target, error.code)
        if any(self.live()) or self._comings.starting:
            return  # the calls that wait are served by what is there, or by a start still under way
        if isinstance(error, agent_errors.StartStopped):
            self.poke(self._clock())  # whoever stopped it had nothing against the calls that wait
            return
        self._line.fail(as_answer(self.target, error))

    def start_refused(self, error: errors.PilotlightError) -> None:
        """A start could not even be asked for: a secret is missing, a quota is used up, the node is not for this tenant."""
        if any(self.live()):
            return  # the calls that wait are served by what is there
        self._line.fail(error)

    @property
    def is_needed(self) -> bool:
        """See starts.Owner."""
        if not self.is_retired and len(self.instances) < self.min_instances:
            return True
        return len(self._line) > (self._comings.starting - 1) * self.target.spec.scaling.max_inputs

    @property
    def priority(self) -> Priority:
        """See starts.Owner."""
        return self._line.priority()

    def gone(self, instance_id: str, reason: str) -> None:
        """An instance's process ended unasked: calls on it fail by themselves, waiters get another."""
        if self._comings.last_word(instance_id, reason):
            return
        instance = self.instances.pop(instance_id, None)
        if instance is None:
            return
        log.info("instance gone instance=%s reason=%s", instance_id, reason)
        instance.settle_idle()
        instance.mark_gone(reason)
        self._comings.give_back(instance_id)
        self.poke(self._clock())

    def drain(self, instance: Instance) -> None:
        """No more calls for it; stopped as soon as it is idle."""
        if instance.is_draining or instance.is_gone:
            return
        instance.is_draining = True
        if not instance.in_flight:
            self._stop(instance, "idle")

    def drain_idle(self) -> None:
        """Nothing is kept that has nothing to do."""
        for instance in [instance for instance in self.live() if not instance.in_flight]:
            self.drain(instance)

    @property
    def is_making_room(self) -> bool:
        """Whether an instance is on its way out."""
        return bool(self._comings.stopping) or any(instance.is_draining for instance in self.instances.values())

    def settle_idle(self) -> None:
        """Write down what idle instances owe: those that min_instances holds from their first idle moment, others beyond the free
        window."""
        reserved = self.min_instances if not self.is_retired else 0
        for n, instance in enumerate(self.instances.values()):
            instance.account.reserve(is_reserved=n < reserved, now_ns=time.monotonic_ns())
            instance.settle_idle()

    @property
    def min_instances(self) -> int:
        """How many this activator keeps warm: its share of what all of them keep together."""
        wanted = self.target.spec.scaling.min_instances if self.is_kept else 0
        return wanted if self._allowance is None else self._allowance.share(wanted)

    def make_room(self, want: Want | None, members: int) -> None:
        """Other activators were refused a start of this revision (None: no longer): drain one instance for them, where that is fair."""
        victim = self._generosity.choose(self, want, members, self._clock())
        if victim is not None:
            log.info("instance given up for another activator instance=%s want=%s", victim.id, want)
            self.drain(victim)

    def retire(self) -> None:
        """This revision has no traffic any more: drain everything."""
        self.is_retired = True
        for instance in list(self.instances.values()):
            self.drain(instance)

    def _stop(self, instance: Instance, reason: str) -> None:
        self.instances.pop(instance.id, None)
        instance.settle_idle()
        instance.leave()
        log.info("instance stops instance=%s reason=%s", instance.id, reason)
        self._comings.stop(instance)
        if self._line:
            self.poke(self._clock())  # its place within max_instances is free

    # -- what the autoscaler reads ------------------------------------------------------------------------------------
    @property
    def waiting(self) -> int:
        """Calls without a slot."""
        return len(self._line)

    @property
    def starting(self) -> int:
        """Starts under way."""
        return self._comings.starting

    @property
    def held_up(self) -> int:
        """Of these, starts that wait for a quota, or for room on the node."""
        return self._comings.held_up

    def is_starting(self, instance_id: str) -> bool:
        """Whether this instance is one of the starts under way."""
        return self._comings.is_starting(instance_id)

    @property
    def in_flight(self) -> int:
        """Calls with a slot."""
        return sum(i.in_flight for i in self.instances.values())

    def oldest_wait_s(self, now: float) -> float | None:
        """How long the first in the queue has waited; None when nobody does."""
        return self._line.oldest_wait_s(now)

    def expected_start_s(self) -> float | None:
        """Seconds that the next start will take, by the rung that it will use; None when nothing is known."""
        return self.start_times.expected_s()

    def live(self) -> Iterator[Instance]:
        """Instances that take calls."""
        return (i for i in self.instances.values() if not i.is_gone and not i.is_draining)

    async def aclose(self) -> None:
        """Give up: waiters are told, starts abandoned, stops finished."""
        self._line.fail(errors.Unavailable("the activator is shutting down", retry_after_s=1))
        await self._comings.aclose()
