"""The buffer before a revision's instances: hands out slots, holds the calls that wait, asks for starts.

The mutable state is: the instances, the calls that wait for a slot (first in, first out), and the starts under way. Every change happens
in one
of the synchronous methods, which hand free slots to waiters before they return; no `await` stands between a decision and its effect, so no
lock is needed. Owner: the event loop.

A call that finds no free slot waits, and pokes: how many starts to begin right now is `poke.instances_now`, which counts instances that are
starting as capacity. No tick stands between a call and the first instance.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from activator.admission import ProcessQueue
from activator.autoscaler.poke import instances_now
from activator.billing.account import InstanceAccount, Ticket
from activator.fleet import Fleet, new_instance_id
from activator.instances import Instance, least_loaded
from activator.routes import Target
from activator.shared.state import Allowance, Want
from activator.surplus import Claim, surplus
from pilotlight import errors
from snapshotter import errors as agent_errors
from snapshotter.types import InstanceInfo, StartKind

log = logging.getLogger(__name__)

AGENT_RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Waits between starts while the agent is down; the last one repeats as long as somebody waits."""
ALLOWANCE_RETRY_S = (0.02, 0.05, 0.1, 0.25)
"""Waits between requests for an allowance that the other activators hold; the last one repeats as long as the start is needed."""
STOP_GRACE_S = 30.0
"""Between SIGTERM and SIGKILL: exit hooks and calls in flight get this long, an idle instance needs none of it."""
LAST_WORD_S = 1.0
"""After a stop the agent may still tell that the process had died before it, and of what."""
STUCK_GRACE_S = 5.0
"""The same for an instance with a call in it that did not end with its clock: enough for exit hooks, and nothing to hope for beyond."""


class Billable(Protocol):
    """What the books want to know of a call."""

    id: str
    attempt: int
    key_id: str
    method: str

    @property
    def queued_ms(self) -> float:
        """Milliseconds that it waited, without the start."""
        ...


class Reservation:
    """A held slot. Whoever holds it must `release` it exactly once.

    Attributes:
        start_kind: how this call got its instance: WARM, or the rung of the start it waited for.
        start_ms: the part of the wait that was that start.
    """

    __slots__ = ("instance", "start_kind", "start_ms", "throttler")

    def __init__(self, throttler: Throttler, instance: Instance, start_kind: StartKind, start_ms: float) -> None:
        self.throttler = throttler
        self.instance = instance
        self.start_kind = start_kind
        self.start_ms = start_ms

    def open(self, call: Billable) -> Ticket:
        """Write the attempt into the journal and start its meter, before it is dispatched. Raises JournalFull."""
        return self.instance.account.open(
            call=call.id, attempt=call.attempt, key=call.key_id, method=call.method, start_kind=self.start_kind.value,
            queued_ms=int(call.queued_ms), start_ms=int(self.start_ms), now_ns=time.monotonic_ns(), at_ns=time.time_ns(),
        )  # fmt: skip

    def close(self, ticket: Ticket, *, status: int, outcome: str, bytes_in: int, bytes_out: int) -> str:
        """Stop the meter and write the complete record; returns the cost as text."""
        return self.instance.account.close(
            ticket, status=status, outcome=outcome, bytes_in=bytes_in, bytes_out=bytes_out, now_ns=time.monotonic_ns(), at_ns=time.time_ns()
        ).cost

    def release(self) -> None:
        """Give the slot back."""
        self.throttler.release(self.instance)


class _Waiter:
    __slots__ = ("future", "since")

    def __init__(self, future: asyncio.Future[Reservation], since: float) -> None:
        self.future = future
        self.since = since


class StartObserver(Protocol):
    """Told of what happens to instances, for metrics and bills."""

    def instance_ready(self, target: Target, info: InstanceInfo, seconds: float) -> None:
        """An instance came up after `seconds`."""
        ...

    def start_failed(self, target: Target, code: str) -> None:
        """A start failed; `code` is the error's."""
        ...


class _NotNeeded(Exception):
    """Raised when nobody waits any more for a start that had no allowance yet."""


class Throttler:
    """One revision's slots, waiters and starts. `allowance` is None when this activator is the only one."""

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.target = target
        self._allowance = allowance
        self._starved_since: float | None = None
        self._fleet = fleet
        self._queue = queue
        self._secret_env = secret_env
        self._observer = observer
        self._account = account
        self._clock = clock
        self.instances: dict[str, Instance] = {}
        self._waiters: deque[_Waiter] = deque()
        self._starts: dict[str, asyncio.Task[None]] = {}
        self._stops: set[asyncio.Task[None]] = set()
        self._leaving: dict[str, Instance] = {}
        self._start_s: dict[StartKind, float] = {}
        self._load = 0
        self._area = 0.0
        self._area_at = clock()
        self.calls = 0
        self.last_call_at = clock()
        self.is_retired = False

    def __repr__(self) -> str:
        flying = sum(i.in_flight for i in self.instances.values())
        return (
            f"<Throttler {self.target.app}/{self.target.function}@{self.target.revision} "
            f"{len(self.instances)} instances, {len(self._starts)} starting, {flying} in flight, {len(self._waiters)} waiting>"
        )

    # -- slots --------------------------------------------------------------------------------------------------------
    def reserve_nowait(self) -> Reservation | None:
        """A free slot, or None when the call must wait."""
        now = self._clock()
        if self._waiters:
            return None
        instance = least_loaded(self.instances.values(), now)
        if instance is None:
            return None
        self._count(+1, now)
        instance.in_flight += 1
        return Reservation(self, instance, StartKind.WARM, 0.0)

    async def reserve(self, timeout_s: float) -> Reservation:
        """A slot within `timeout_s`, starting instances where that helps.

        Raises TooManyRequests (queue full), DeadlineExceeded (clock `queue`), StartFailed, Unavailable. Cancelling it leaves the queue.
        """
        reservation = self.reserve_nowait()
        if reservation is not None:
            return reservation
        waiter = self._enqueue()
        timer = asyncio.get_running_loop().call_later(timeout_s, self._expire, waiter, timeout_s)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            self._give_up(waiter)
            raise
        finally:
            timer.cancel()
            self._queue.leave()

    def release(self, instance: Instance) -> None:
        """A call ended: its slot goes to the one who waits longest."""
        now = self._clock()
        instance.in_flight -= 1
        self._count(-1, now)
        if not instance.in_flight:
            instance.idle_since = now
            if instance.is_draining and not instance.is_gone:
                self._stop(instance, "drained")
        if self._waiters:
            self._hand_out(now)

    def retry_slots(self) -> None:
        """Look again: an instance that was busy may be free."""
        self._hand_out(self._clock())

    def _enqueue(self) -> _Waiter:
        limit = self.target.spec.scaling.max_queued
        if len(self._waiters) >= limit:
            raise errors.TooManyRequests(
                f"{self.target.app}/{self.target.function} already has {limit} calls waiting, its bound (max_queued)",
                retry_after_s=self._expected_wait_s(),
            )
        self._queue.enter()
        now = self._clock()
        waiter = _Waiter(asyncio.get_running_loop().create_future(), now)
        self._waiters.append(waiter)
        self._count(+1, now)
        self.poke(now)
        self._look_again_when_unblocked(now)
        return waiter

    def _hand_out(self, now: float, fresh: Instance | None = None, start_ms: float = 0.0) -> None:
        while self._waiters:
            instance = fresh if fresh is not None and fresh.has_slot(now) else least_loaded(self.instances.values(), now)
            if instance is None:
                self._look_again_when_unblocked(now)
                return
            waiter = self._waiters.popleft()
            if waiter.future.done():  # cancelled in this very moment: it finds itself gone, so it leaves the load here
                self._count(-1, now)
                continue
            instance.in_flight += 1
            kind = StartKind.WARM if instance is not fresh else instance.start_kind
            waited_ms = (now - waiter.since) * 1000
            waiter.future.set_result(Reservation(self, instance, kind, min(waited_ms, start_ms) if instance is fresh else 0.0))

    def _look_again_when_unblocked(self, now: float) -> None:
        until = min((i.blocked_until for i in self.instances.values() if i.blocked_until > now and not i.is_gone), default=None)
        if until is not None:
            asyncio.get_running_loop().call_later(until - now, self.retry_slots)

    def _give_up(self, waiter: _Waiter) -> None:
        if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
            waiter.future.result().release()  # the slot came in the same moment: it must not be lost
            return
        self._leave(waiter)

    def _leave(self, waiter: _Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            self._count(-1, self._clock())

    def _expire(self, waiter: _Waiter, timeout_s: float) -> None:
        if not waiter.future.done():
            self._leave(waiter)
            waiter.future.set_exception(
                errors.DeadlineExceeded(
                    f"no instance of {self.target.app}/{self.target.function} was free within {timeout_s:g} s",
                    clock="queue",
                    retry_after_s=1,
                )
            )

    def _fail_waiters(self, error: errors.PilotlightError) -> None:
        now = self._clock()
        while self._waiters:
            waiter = self._waiters.popleft()
            self._count(-1, now)
            if not waiter.future.done():
                waiter.future.set_exception(error)

    # -- starts and stops ---------------------------------------------------------------------------------------------
    def poke(self, now: float) -> None:
        """Begin the starts that the waiting calls need now."""
        scaling = self.target.spec.scaling
        wanted = instances_now(
            waiting=len(self._waiters),
            free_slots=sum(i.capacity - i.in_flight for i in self.live()),
            starting_slots=len(self._starts) * scaling.max_inputs,
            max_inputs=scaling.max_inputs,
            instances=len(self.instances) + len(self._starts),
            max_instances=scaling.max_instances,
        )
        self.start(wanted)

    def start(self, count: int) -> None:
        """Begin `count` starts, within max_instances."""
        room = self.target.spec.scaling.max_instances - len(self._starts) - len(self.instances)
        for _ in range(min(count, room)):
            instance_id = new_instance_id()
            self._starts[instance_id] = asyncio.create_task(self._start(instance_id), name=f"start {instance_id}")

    async def _start(self, instance_id: str) -> None:
        began = self._clock()
        try:
            await self._wait_allowance()
            info = await self._start_with_allowance(instance_id)
        except _NotNeeded:
            del self._starts[instance_id]
        except agent_errors.SnapshotterError as e:
            del self._starts[instance_id]
            self._observer.start_failed(self.target, e.code)
            self._start_failed(e)
        except errors.PilotlightError as e:
            del self._starts[instance_id]
            self._fail_waiters(e)
        except BaseException:
            self._starts.pop(instance_id, None)
            raise
        else:
            del self._starts[instance_id]
            self.add(info, began)

    async def _wait_allowance(self) -> None:
        """Until all activators together may hold one instance more. The calls meanwhile wait, each to its own deadline."""
        if self._allowance is None:
            return
        attempt = 0
        while not await self._allowance.take_instances(self.target.key, 1, self.target.spec.scaling.max_instances):
            if not self._waiters and (self.is_retired or len(self.instances) >= self.min_instances):
                raise _NotNeeded
            await asyncio.sleep(ALLOWANCE_RETRY_S[min(attempt, len(ALLOWANCE_RETRY_S) - 1)])
            attempt += 1

    async def _start_with_allowance(self, instance_id: str) -> InstanceInfo:
        try:
            return await self._start_despite_outage(instance_id)
        except BaseException:
            self._give_back()
            raise

    def _give_back(self) -> None:
        if self._allowance is not None:
            self._allowance.give_back(self.target.key)

    async def _start_despite_outage(self, instance_id: str) -> InstanceInfo:
        attempt = 0
        while True:
            try:
                return await self._fleet.start(self.target, instance_id, self._secret_env(self.target))  # type: ignore[arg-type]
            except agent_errors.AgentUnavailable:
                if not self._waiters and not self.min_instances:
                    raise
                await asyncio.sleep(AGENT_RETRY_S[min(attempt, len(AGENT_RETRY_S) - 1)])
                attempt += 1

    def add(self, info: InstanceInfo, began: float | None = None) -> None:
        """An instance is ready (or was adopted): its slots go to those who wait."""
        now = self._clock()
        account = self._account(self.target, info.id)
        instance = Instance(info, account=account, capacity=self.target.spec.scaling.max_inputs, now=now)
        self.instances[instance.id] = instance
        start_s = now - began if began is not None else 0.0
        if began is None and self._allowance is not None:
            self._allowance.hold(self.target.key)
        if began is not None:
            self._start_s[info.start_kind] = start_s
            self._observer.instance_ready(self.target, info, start_s)
        self._hand_out(now, instance, start_s * 1000)
        if self.is_retired:
            self.drain(instance)

    def _start_failed(self, error: agent_errors.SnapshotterError) -> None:
        log.warning("start failed target=%r code=%s error=%s", self.target, error.code, error)
        if any(not i.is_gone and not i.is_draining for i in self.instances.values()) or self._starts:
            return  # the calls that wait are served by what is there, or by a start still under way
        self._fail_waiters(as_answer(self.target, error))

    def gone(self, instance_id: str, reason: str) -> None:
        """An instance's process ended unasked: calls on it fail by themselves, waiters get another."""
        leaving = self._leaving.pop(instance_id, None)
        if leaving is not None:
            leaving.mark_gone(reason)  # calls that broke with it wait for this word
            return
        instance = self.instances.pop(instance_id, None)
        if instance is None:
            return
        log.info("instance gone instance=%s reason=%s", instance_id, reason)
        self._settle(instance)
        instance.mark_gone(reason)
        self._give_back()
        self.poke(self._clock())

    def drain(self, instance: Instance) -> None:
        """No more calls for it; stopped as soon as it is idle."""
        if instance.is_draining or instance.is_gone:
            return
        instance.is_draining = True
        if not instance.in_flight:
            self._stop(instance, "idle")

    def settle_idle(self) -> None:
        """Write down what idle instances owe: those that min_instances holds from their first idle moment, others beyond the free
        window."""
        reserved = self.min_instances if not self.is_retired else 0
        now_ns, at_ns = time.monotonic_ns(), time.time_ns()
        for n, instance in enumerate(self.instances.values()):
            instance.account.reserve(is_reserved=n < reserved, now_ns=now_ns)
            instance.account.settle_idle(now_ns=now_ns, at_ns=at_ns)

    @property
    def min_instances(self) -> int:
        """How many this activator keeps warm: its share of what all of them keep together."""
        wanted = self.target.spec.scaling.min_instances
        return wanted if self._allowance is None else self._allowance.share(wanted)

    def make_room(self, want: Want | None, members: int) -> None:
        """Other activators were refused a start of this revision (None: no longer): drain one instance for them, where that is fair.

        One at a time, and none while one is on its way out; a busy one finishes its calls.
        """
        now = self._clock()
        if want is None or not want.starving:
            self._starved_since = None
        elif self._starved_since is None:
            self._starved_since = now
        if want is None or self._stops or any(i.is_draining for i in self.instances.values()):
            return
        victim = surplus(
            list(self.live()),
            Claim(
                want=want,
                starved_s=now - self._starved_since if self._starved_since is not None else 0.0,
                members=members,
                min_instances=self.min_instances,
                max_instances=self.target.spec.scaling.max_instances,
                waiting=len(self._waiters),
            ),
            now,
        )
        if victim is not None:
            log.info("instance given up for another activator instance=%s want=%s", victim.id, want)
            self._starved_since = None
            self.drain(victim)

    def _settle(self, instance: Instance) -> None:
        instance.account.settle_idle(now_ns=time.monotonic_ns(), at_ns=time.time_ns())

    def retire(self) -> None:
        """This revision has no traffic any more: drain everything."""
        self.is_retired = True
        for instance in list(self.instances.values()):
            self.drain(instance)

    def _stop(self, instance: Instance, reason: str) -> None:
        self.instances.pop(instance.id, None)
        self._settle(instance)
        instance.leave()
        self._leaving[instance.id] = instance
        log.info("instance stops instance=%s reason=%s", instance.id, reason)
        task = asyncio.create_task(self._stop_now(instance), name=f"stop {instance.id}")
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)
        if self._waiters:
            self.poke(self._clock())  # its place within max_instances is free

    async def _stop_now(self, instance: Instance) -> None:
        try:
            await self._fleet.stop(instance.info.id, grace_s=STUCK_GRACE_S if instance.is_stuck else STOP_GRACE_S)
        except agent_errors.SnapshotterError as e:
            log.warning("stop failed instance=%s error=%s", instance.id, e)
        finally:
            asyncio.get_running_loop().call_later(LAST_WORD_S, self._leaving.pop, instance.id, None)
            self._give_back()

    def kill(self, instance: Instance, reason: str) -> None:
        """End an instance that does not obey, at once."""
        instance.gone_reason = reason
        self.gone(instance.id, reason)
        task = asyncio.create_task(self._kill_now(instance), name=f"kill {instance.id}")
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)

    async def _kill_now(self, instance: Instance) -> None:
        try:
            await self._fleet.stop(instance.info.id, grace_s=0.0)
        except agent_errors.SnapshotterError as e:
            log.warning("kill failed instance=%s error=%s", instance.id, e)

    # -- what the autoscaler reads ------------------------------------------------------------------------------------
    def _count(self, change: int, now: float) -> None:
        self._area += self._load * (now - self._area_at)
        self._area_at = now
        self._load += change
        if change > 0:
            self.calls += 1
            self.last_call_at = now

    def take_concurrency(self, now: float, elapsed_s: float) -> float:
        """Average calls waiting or in flight since the last take: the area under the load curve over `elapsed_s`."""
        self._area += self._load * (now - self._area_at)
        self._area_at = now
        area, self._area = self._area, 0.0
        return area / elapsed_s if elapsed_s > 0 else float(self._load)

    @property
    def waiting(self) -> int:
        """Calls without a slot."""
        return len(self._waiters)

    @property
    def starting(self) -> int:
        """Starts under way."""
        return len(self._starts)

    def is_starting(self, instance_id: str) -> bool:
        """Whether this instance is one of the starts under way."""
        return instance_id in self._starts

    @property
    def in_flight(self) -> int:
        """Calls with a slot."""
        return sum(i.in_flight for i in self.instances.values())

    def oldest_wait_s(self, now: float) -> float | None:
        """How long the first in the queue has waited; None when nobody does."""
        return now - self._waiters[0].since if self._waiters else None

    def expected_start_s(self) -> float | None:
        """Seconds that the next start will take, by the last one seen; None when none was."""
        return min(self._start_s.values()) if self._start_s else None

    def _expected_wait_s(self) -> float:
        return max(1.0, self.expected_start_s() or 1.0)

    def live(self) -> Iterator[Instance]:
        """Instances that take calls."""
        return (i for i in self.instances.values() if not i.is_gone and not i.is_draining)

    async def aclose(self) -> None:
        """Give up: waiters are told, starts abandoned, stops finished."""
        self._fail_waiters(errors.Unavailable("the activator is shutting down", retry_after_s=1))
        tasks = [*self._starts.values(), *self._stops]
        for task in self._starts.values():
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def as_answer(target: Target, error: agent_errors.SnapshotterError) -> errors.PilotlightError:
    """What the caller is told of a failed start: user errors are theirs to mend, the platform's carry Retry-After."""
    name = f"{target.app}/{target.function}"
    if isinstance(error, agent_errors.StartTimeout):
        return errors.DeadlineExceeded(f"{name} did not start in time: {error}", clock="startup", retry_after_s=5, **error.detail)
    if isinstance(error, agent_errors.StartFailed):
        return errors.StartFailed(f"{name} could not start: {error}", **error.detail)
    if isinstance(error, agent_errors.NoCapacity):
        return errors.Unavailable(f"no room for {name}: {error}", retry_after_s=5, **error.detail)
    return errors.Unavailable(f"{name} cannot start now: {error}", retry_after_s=2, **error.detail)
