"""The instances of one revision: how they come, how they go, and what is owed for them while they
are idle.

What they are for, the slots and the calls that wait for them, is the Throttler's, which this is one
half of: the mutable state here is the instances and the starts under way. Every change happens in
one of the synchronous methods; what takes time, bringing instances up and ending them, is
`instance_lifecycle.InstanceLifecycle`. Owner: the event loop."""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from activator.autoscaler.start_time_estimator import StartTimeEstimator
from activator.balancing.fleet import Fleet
from activator.balancing.frozen_instances import Frozen
from activator.balancing.instance import Instance, slots_of
from activator.balancing.instance_lifecycle import InstanceLifecycle, StartObserver
from activator.balancing.rebalancing import RebalanceState
from activator.balancing.suspended_instances import SuspendedInstances, may_sleep
from activator.billing.cpu import PauseCpuMeter
from activator.billing.instance_meter import InstanceAccount
from activator.coordination.state import InstanceDemand, InstanceLeases
from activator.fairness.start_admission import StartAdmission
from activator.routing.route_table import CallTarget
from pilotlight import errors
from pilotlight.types import Priority
from snapshotter import errors as agent_errors
from snapshotter.cpu_counter import CpuCounter
from snapshotter.types import InstanceInfo, InstanceState

log = logging.getLogger(__name__)


class InstancePool(ABC):
    """One revision's instances and starts. `allowance`: None when this activator is the only one;
    `gate`: None lets every start go.

    Attributes:
        instances: by id, those on their way out too, until they are idle. is_retired: no traffic
        any more. is_kept: False while its budget is spent: `min_instances` keeps nothing.
        is_awaited: it is to take over from another revision as soon as it has an instance: its
        start is worth waiting for. kept_until: monotonic time until which one instance stays
        although it is retired, for the way back.
    """

    def __init__(
        self,
        target: CallTarget,
        *,
        fleet: Fleet,
        secret_env: Callable[[CallTarget], dict[str, str]],
        observer: StartObserver,
        account: Callable[[CallTarget, str], InstanceAccount],
        allowance: InstanceLeases | None,
        gate: StartAdmission | None,
        clock: Callable[[], float],
    ) -> None:
        self.target = target
        self._fleet = fleet
        self._allowance = allowance
        self._generosity = RebalanceState()
        self._observer = observer
        self._account = account
        self._clock = clock
        self.instances: dict[str, Instance] = {}
        self._gate = gate or StartAdmission(clock=clock)
        self._comings = InstanceLifecycle(
            target,
            fleet=fleet,
            secret_env=secret_env,
            allowance=allowance,
            gate=self._gate,
            owner=self,
            clock=clock,
        )
        self.start_times = StartTimeEstimator()
        self.asleep = SuspendedInstances(fleet=fleet, owner=self, clock=clock)
        self.frozen = Frozen(fleet=fleet, owner=self)
        self.is_retired = False
        self.is_kept = True
        self.is_awaited = False
        self.kept_until = 0.0
        self._is_unmetered = False

    # -- what the calls say to it ------------------------------------------------------------------
    @property
    @abstractmethod
    def waiting(self) -> int:
        """Calls without a slot."""

    @property
    @abstractmethod
    def is_needed(self) -> bool:
        """See starts.Owner."""

    @property
    @abstractmethod
    def priority(self) -> Priority:
        """See starts.Owner."""

    @abstractmethod
    def start_failed(self, error: agent_errors.SnapshotterError) -> None:
        """See starts.Owner."""

    @abstractmethod
    def start_refused(self, error: errors.PilotlightError) -> None:
        """See starts.Owner."""

    @abstractmethod
    def poke(self, now: float) -> None:
        """Begin the starts that the waiting calls need now."""

    @abstractmethod
    def _hand_out(self, now: float, fresh: Instance | None = None, start_ms: float = 0.0) -> None:
        """Free slots go to those who wait; `fresh`: the instance that has just come, after
        `start_ms`."""

    # -- up ----------------------------------------------------------------------------------------
    @property
    def slots_each(self) -> int:
        """Calls at once that an instance which starts now will take."""
        return slots_of(self.target.spec)

    def retarget(self, target: CallTarget) -> None:
        """The same revision was told anew: starts from now on launch what `target` says (whether it
        may be kept on disk, its prices, …)."""
        is_other = target.launch != self.target.launch or target.rates != self.target.rates
        self.target = target
        if is_other:
            self._comings.retarget(target)

    def start(self, count: int) -> None:
        """Begin `count` starts, within max_instances: those that sleep are woken first."""
        room = self.target.spec.scaling.max_instances - self.starting - len(self.instances)
        wanted = min(count, room)
        if len(self.asleep):
            wanted -= self.asleep.wake(self.target, wanted)
            # one that is just falling asleep has its place
            wanted = min(wanted, room - len(self.asleep))
        self._comings.start(wanted)

    def add(self, info: InstanceInfo, began: float | None = None) -> None:
        """An instance is ready (or was adopted): its slots go to those who wait."""
        now = self._clock()
        instance = Instance(
            info, account=self._account(self.target, info.id), capacity=self.slots_each, now=now
        )
        self._meter_cpu(instance, is_new=began is not None)
        is_asleep = info.state is InstanceState.ASLEEP
        if is_asleep and self.target.spec.scaling.keep_asleep_s > 0:
            self._comings.adopted(instance.id)
            self.asleep.adopt(self.target, instance)
            return
        self.instances[instance.id] = instance
        if is_asleep:
            self.frozen.adopt(instance)
        start_s = now - began if began is not None else 0.0
        if began is None:
            self._comings.adopted(instance.id)
        else:
            self._started(instance, start_s)
        self._hand_out(now, instance, start_s * 1000)
        if self.is_retired:
            self.drain(instance)

    def _meter_cpu(self, instance: Instance, *, is_new: bool) -> None:
        """From its beginning, or, where it was adopted, from now on: what came before is in the
        ledger, or was lost with who metered it."""
        counter = CpuCounter.of(instance.info)
        if counter is None:
            if not self._is_unmetered:
                log.warning(
                    "cpu time outside calls is not metered: the instance is not on this machine "
                    "target=%r",
                    self.target,
                )
            self._is_unmetered = True
            return
        cpu = PauseCpuMeter(counter, from_ns=instance.info.cpu_from_ns if is_new else None)
        instance.account.meter_cpu(cpu, at_ns=time.time_ns())

    def start_used(self, instance_id: str, cpu_ns: int) -> None:
        """See starts.Owner."""
        if cpu_ns > 0:
            self._account(self.target, instance_id).start_failed(
                cpu_ns=cpu_ns, at_ns=time.time_ns()
            )

    def _started(self, instance: Instance, start_s: float) -> None:
        """Charge the start, then remember what it took, which may fail nobody's start: bytes come
        to a node once, whatever rung waits for them; a place is waited for by who is late."""
        info = instance.info
        billed_s = max(0.0, start_s - _phase_s(info, "queue"))
        instance.account.started(
            start_kind=info.start_kind.value, billed_ns=int(billed_s * 1e9), at_ns=time.time_ns()
        )
        try:
            self.start_times.observe(
                info.start_kind,
                max(0.0, start_s - _phase_s(info, "weights")),
                info.phases_ms.keys(),
            )
            self._observer.instance_ready(self.target, info, start_s)
        except ValueError:
            log.warning(
                "start is not counted in metrics instance=%s target=%r",
                info.id,
                self.target,
                exc_info=True,
            )

    # -- out ---------------------------------------------------------------------------------------
    def gone(self, instance_id: str, reason: str, cpu_ns: int | None = None) -> None:
        """An instance's process ended unasked: calls on it fail by themselves, waiters get another.
        `cpu_ns`: see `Instance.settle_end`."""
        if self._comings.last_word(instance_id, reason, cpu_ns):
            return
        if self.asleep.has(instance_id):
            self._gone_in_its_sleep(instance_id, reason, cpu_ns)
            return
        instance = self.instances.pop(instance_id, None)
        if instance is None:
            return
        log.info("instance gone instance=%s reason=%s", instance_id, reason)
        self.frozen.leave(instance)
        instance.settle_end(cpu_ns)
        instance.mark_gone(reason)
        self._observer.instance_lost(self.target, reason)
        self._comings.give_back(instance_id)
        self.poke(self._clock())

    def _gone_in_its_sleep(self, instance_id: str, reason: str, cpu_ns: int | None) -> None:
        """Its process ended while it slept, or woke."""
        log.info("instance gone in its sleep instance=%s reason=%s", instance_id, reason)
        if (instance := self.asleep.gone(instance_id)) is not None:
            instance.settle_cpu(cpu_ns)
        self._observer.instance_lost(self.target, reason)
        self._comings.give_back(instance_id)
        self.poke(self._clock())

    def not_woken(self, instance: Instance) -> None:
        """A call that waits for it gets another instance."""
        self._comings.stop(instance)
        self.poke(self._clock())

    def end_asleep(self, now: float = math.inf) -> None:
        """Those that have slept long enough by `now` end; without it, all."""
        for instance in self.asleep.expired(now):
            self.give_up_asleep(instance.id)

    def give_up_asleep(self, instance_id: str) -> bool:
        """One that sleeps ends now; False: it is none of these."""
        instance = self.asleep.take(instance_id)
        if instance is None:
            return False
        log.info("instance stops instance=%s reason=asleep", instance_id)
        self._comings.stop(instance)
        return True

    def rest(self, instance: Instance) -> None:
        """It is not needed: no more calls for it, and as soon as it is idle it sleeps, where the
        function says so, or is stopped."""
        instance.may_rest = True
        self.drain(instance)

    def drain(self, instance: Instance) -> None:
        """No more calls for it; stopped as soon as it is idle."""
        if instance.is_draining or instance.is_gone:
            return
        instance.is_draining = True
        if not instance.in_flight:
            self._stop(instance, "idle")

    def freeze_idle(self, now: float, idle_s: float) -> None:
        """Instances that have had nothing to do for `idle_s` stand still until a call waits."""
        if not self._fleet.can_sleep or self.target.spec.engine is not None:
            return
        for instance in self.live():
            if (
                not instance.in_flight
                and not instance.is_frozen
                and now - instance.idle_since >= idle_s
                and now >= instance.blocked_until
            ):
                self.frozen.freeze(instance)

    def thawed(self, instance: Instance) -> None:
        """See frozen.FrozenOwner."""
        self._hand_out(self._clock())

    def drain_idle(self) -> None:
        """Nothing is kept that has nothing to do."""
        for instance in [instance for instance in self.live() if not instance.in_flight]:
            self.drain(instance)
        self.end_asleep()

    @property
    def is_making_room(self) -> bool:
        """Whether an instance is on its way out."""
        return bool(self._comings.stopping) or any(
            instance.is_draining for instance in self.instances.values()
        )

    def settle_idle(self) -> None:
        """Write down what idle instances owe: those that min_instances holds from their first idle
        moment, others beyond the free window."""
        reserved = self.min_instances if not self.is_retired else 0
        for n, instance in enumerate(self.instances.values()):
            instance.account.reserve(is_reserved=n < reserved, now_ns=time.monotonic_ns())
            instance.settle_idle()

    @property
    def min_instances(self) -> int:
        """How many this activator keeps warm: its share of what all of them keep together."""
        wanted = self.target.spec.scaling.min_instances if self.is_kept else 0
        return wanted if self._allowance is None else self._allowance.share(wanted)

    def make_room(self, want: InstanceDemand | None, members: int) -> None:
        """Other activators were refused a start of this revision (None: no longer): drain one
        instance for them, where that is fair."""
        if want is not None and (sleeping := self.asleep.instances()) and not self.is_making_room:
            self.give_up_asleep(sleeping[0].id)
            return
        most = self._fleet.most_of(self.target.key) if want is not None else None
        victim = self._generosity.choose(self, want, members, self._clock(), most=most)
        if victim is not None:
            log.info("instance given up for another activator instance=%s want=%s", victim.id, want)
            self.drain(victim)

    def retire(self) -> None:
        """This revision has no traffic any more: drain everything, but one instance as long as it
        is kept for the way back."""
        self.is_retired = True
        live = sorted(self.live(), key=lambda instance: instance.in_flight)
        kept = live[:1] if self.is_kept and self._clock() < self.kept_until else []
        for instance in [instance for instance in self.instances.values() if instance not in kept]:
            instance.may_rest = False
            self.drain(instance)
        self.end_asleep()

    def _stop(self, instance: Instance, reason: str) -> None:
        self.instances.pop(instance.id, None)
        self.frozen.leave(instance)
        instance.settle_idle()
        sleeps = (
            self._fleet.can_sleep
            and may_sleep(self.target, instance)
            and self.is_kept
            and not self.is_retired
        )
        instance.leave()
        if sleeps:
            self.asleep.put(self.target, instance)
            self.poke(self._clock())
            return
        log.info("instance stops instance=%s reason=%s", instance.id, reason)
        self._comings.stop(instance)
        self.poke(self._clock())  # its place within max_instances is free

    # -- what is there -----------------------------------------------------------------------------
    @property
    def starting(self) -> int:
        """Starts under way."""
        return self._comings.starting + self.asleep.waking

    @property
    def held_up(self) -> int:
        """Of these, starts that wait for a quota, or for room on the node."""
        return self._comings.held_up

    def is_starting(self, instance_id: str) -> bool:
        """Whether this instance is one of the starts under way."""
        return self._comings.is_starting(instance_id) or self.asleep.has(instance_id)

    @property
    def in_flight(self) -> int:
        """Calls with a slot."""
        return sum(i.in_flight for i in self.instances.values())

    def expected_start_s(self) -> float | None:
        """Seconds that the next start will take, by the rung that it will use; None when nothing is
        known."""
        return self.start_times.expected_s()

    @property
    def free_slots(self) -> int:
        """Calls that instances could take now."""
        return sum(max(0, i.capacity - i.in_flight) for i in self.live())

    def live(self) -> Iterator[Instance]:
        """Instances that take calls."""
        return (i for i in self.instances.values() if not i.is_gone and not i.is_draining)


def _phase_s(info: InstanceInfo, phase: str) -> float:
    """Seconds of one phase; 0 for none, and for what is no duration."""
    ms = info.phases_ms.get(phase, 0.0)
    return ms / 1000 if 0 <= ms < math.inf else 0.0
