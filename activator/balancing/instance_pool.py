"""The instances of one revision: start, stop, suspension, and billing of idle time.

This is the base class of the Throttler, which adds slots and waiting calls. The mutable state here
is the instances and the starts in progress. All changes happen in synchronous methods;
`instance_lifecycle.InstanceLifecycle` runs the starts and stops. Owner: the event loop."""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from activator.balancing.idle_instances import FrozenInstances, SuspendedInstances, may_sleep
from activator.balancing.instance import Instance, slots_of
from activator.balancing.instance_lifecycle import (
    InstanceLifecycle,
    InstanceProvisioner,
    StartObserver,
)
from activator.balancing.rebalancing import RebalanceState
from activator.balancing.start_estimates import StartTimeEstimator
from activator.billing.cpu import PauseCpuMeter
from activator.billing.instance_account import InstanceAccount
from activator.coordination.state import InstanceDemand
from activator.routing.route_table import CallTarget
from pilotlight import errors
from pilotlight.spec.identifiers import Priority
from snapshotter import errors as agent_errors
from snapshotter.linux.cpu_counter import CpuCounter
from snapshotter.types import GpuGrant, InstanceInfo, InstanceState

log = logging.getLogger(__name__)

OpenAccount = Callable[[CallTarget, str, GpuGrant | None], InstanceAccount]
"""Opens the account of a new instance, which was granted these GPUs."""
ListenForCalls = Callable[[CallTarget, Instance], None]
"""Begins to serve the calls that an instance's function makes, until the instance is gone."""


class InstancePool(ABC):
    """One revision's instances and starts. `listen`: called with each instance that takes calls.

    Attributes:
        instances: by id, including draining ones until they are idle.
        is_retired: the revision has no traffic.
        is_kept: False while its budget is spent: `min_instances` then has no effect.
        scheduled_min_instances: of its open scaling schedules; `min_instances` where it is larger.
        on_awaited_start: called at the end of each start, with the error's code or "", while it
            takes over from another revision as soon as it has an instance, so that its start is
            needed; None = it does not.
        kept_until: monotonic time until which one instance stays although the revision is retired,
            for a rollback.
    """

    def __init__(
        self,
        target: CallTarget,
        *,
        provisioner: InstanceProvisioner,
        observer: StartObserver,
        account: OpenAccount,
        listen: ListenForCalls,
        clock: Callable[[], float],
    ) -> None:
        self.target = target
        self._listen = listen
        self._fleet = fleet = provisioner.fleet
        self._rebalance: RebalanceState | None = None
        self._observer = observer
        self._account = account
        self._clock = clock
        self.instances: dict[str, Instance] = {}
        self._gate = provisioner.gate
        self._lifecycle = InstanceLifecycle(
            target, provisioner=provisioner, owner=self, clock=clock
        )
        self.start_times = StartTimeEstimator()
        self.asleep = SuspendedInstances(fleet=fleet, owner=self, clock=clock)
        self.frozen = FrozenInstances(fleet=fleet, owner=self)
        self.is_retired = False
        self.is_kept = True
        self.scheduled_min_instances = 0
        self.on_awaited_start: Callable[[str], None] | None = None
        self.kept_until = 0.0
        self._is_unmetered = False

    # -- implemented by the Throttler --------------------------------------------------------------
    @property
    @abstractmethod
    def waiting(self) -> int:
        """Number of calls without a slot."""

    @property
    @abstractmethod
    def is_needed(self) -> bool:
        """Whether the last of the starts in progress is still needed."""

    @property
    @abstractmethod
    def priority(self) -> Priority:
        """The highest priority of the waiting calls."""

    @abstractmethod
    def start_failed(self, error: agent_errors.SnapshotterError) -> None:
        """A start ended without an instance."""

    @abstractmethod
    def start_refused(self, error: errors.PilotlightError) -> None:
        """A start could not be requested."""

    @abstractmethod
    def request_scale_up(self, now: float) -> None:
        """Begin the starts that the waiting calls need."""

    @abstractmethod
    def _assign_free_slots(
        self, now: float, fresh: Instance | None = None, start_ms: float = 0.0
    ) -> None:
        """Assign free slots to waiting calls; `fresh`: an instance that has just started, after
        `start_ms`."""

    # -- up ----------------------------------------------------------------------------------------
    @property
    def slots_each(self) -> int:
        """Maximum number of concurrent calls of an instance that starts now."""
        return slots_of(self.target.spec)

    def retarget(self, target: CallTarget) -> None:
        """Apply a changed definition of the same revision: later starts use the launch of `target`
        (whether it may be stored on disk, its prices, …)."""
        is_other = target.launch != self.target.launch or target.rates != self.target.rates
        self.target = target
        if is_other:
            self._lifecycle.retarget(target)

    def start(self, count: int) -> None:
        """Begin `count` starts, within max_instances; suspended instances are resumed first."""
        room = self.target.spec.scaling.max_instances - self.starting - len(self.instances)
        wanted = min(count, room)
        if len(self.asleep):
            wanted -= self.asleep.resume(self.target, wanted)
            # an instance that is being suspended still counts
            wanted = min(wanted, room - len(self.asleep))
        self._lifecycle.start(wanted)

    def add(self, info: InstanceInfo, began: float | None = None) -> None:
        """Add a started or adopted instance, and assign its slots to waiting calls."""
        now = self._clock()
        account = self._account(self.target, info.id, info.gpus)
        instance = Instance(info, account=account, capacity=self.slots_each, now=now)
        self._meter_cpu(instance, is_new=began is not None)
        is_asleep = info.state is InstanceState.ASLEEP
        if is_asleep and self.target.spec.scaling.keep_asleep_s > 0:
            self._lifecycle.adopted(instance.id)
            self.asleep.adopt(self.target, instance)
            return
        self.instances[instance.id] = instance
        self._listen(self.target, instance)
        if is_asleep:
            self.frozen.adopt(instance)
        start_s = now - began if began is not None else 0.0
        if began is None:
            self._lifecycle.adopted(instance.id)
        else:
            self._started(instance, start_s)
        self._assign_free_slots(now, instance, start_s * 1000)
        if self.is_retired:
            self.drain(instance)

    def _meter_cpu(self, instance: Instance, *, is_new: bool) -> None:
        """Meter CPU time from the start of the instance, or, where it was adopted, from now on:
        earlier usage is in the ledger, or was lost with the process that metered it."""
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
        """Bill the CPU time of a failed start."""
        if cpu_ns > 0:
            self._account(self.target, instance_id, None).start_failed(
                cpu_ns=cpu_ns, at_ns=time.time_ns()
            )

    def _started(self, instance: Instance, start_s: float) -> None:
        """Bill the start, then record its duration for estimates, where errors must not fail the
        start. Estimates leave out the time for weights, which are fetched to a node once; the bill
        leaves out the time in a queue."""
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
                "cannot record start in metrics instance=%s target=%r",
                info.id,
                self.target,
                exc_info=True,
            )
        if self.on_awaited_start is not None:
            self.on_awaited_start("")

    # -- out ---------------------------------------------------------------------------------------
    def instance_exited(self, instance_id: str, reason: str, cpu_ns: int | None = None) -> None:
        """Remove an instance whose process exited unexpectedly: calls on it fail by themselves,
        waiting calls get another. `cpu_ns`: see `Instance.settle_end`."""
        if self._lifecycle.record_exit(instance_id, reason, cpu_ns):
            return
        if self.asleep.has(instance_id):
            self._suspended_exited(instance_id, reason, cpu_ns)
            return
        instance = self.instances.pop(instance_id, None)
        if instance is None:
            return
        log.info("instance exited instance=%s reason=%s", instance_id, reason)
        self.frozen.untrack(instance)
        instance.settle_end(cpu_ns)
        instance.mark_exited(reason)
        self._observer.instance_lost(self.target, reason)
        self._lifecycle.release(instance_id)
        self.request_scale_up(self._clock())

    def _suspended_exited(self, instance_id: str, reason: str, cpu_ns: int | None) -> None:
        """Remove an instance whose process exited while it was suspended or being resumed."""
        log.info("suspended instance exited instance=%s reason=%s", instance_id, reason)
        if (instance := self.asleep.record_exit(instance_id)) is not None:
            instance.settle_stopped(cpu_ns)
        self._observer.instance_lost(self.target, reason)
        self._lifecycle.release(instance_id)
        self.request_scale_up(self._clock())

    def resume_failed(self, instance: Instance) -> None:
        """Stop an instance that could not be resumed, and start another for waiting calls."""
        self._lifecycle.stop(instance)
        self.request_scale_up(self._clock())

    def stop_expired_suspended(self, now: float = math.inf) -> None:
        """Stop the instances whose suspension has expired by `now`; without it, all suspended
        instances."""
        for instance in self.asleep.expired(now):
            self.stop_suspended(instance.id)

    def stop_suspended(self, instance_id: str) -> bool:
        """Stop a suspended instance. Returns False when it is not suspended."""
        instance = self.asleep.remove(instance_id)
        if instance is None:
            return False
        log.info("instance stops instance=%s reason=asleep", instance_id)
        self._lifecycle.stop(instance)
        return True

    def suspend_or_stop(self, instance: Instance) -> None:
        """Drain an instance that is not needed; once idle it is suspended, where the function
        allows it, or stopped."""
        instance.may_suspend = True
        self.drain(instance)

    def drain(self, instance: Instance) -> None:
        """Give an instance no more calls, and stop it as soon as it is idle."""
        if instance.is_draining or instance.is_gone:
            return
        instance.is_draining = True
        if not instance.in_flight:
            self._stop(instance, "idle")

    def freeze_idle(self, now: float, idle_s: float) -> None:
        """Freeze instances that have been idle for `idle_s`, until a call waits."""
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
        """Assign the slots of a thawed instance."""
        self._assign_free_slots(self._clock())

    def drain_idle(self) -> None:
        """Stop all idle and suspended instances."""
        for instance in [instance for instance in self.live() if not instance.in_flight]:
            self.drain(instance)
        self.stop_expired_suspended()

    def stop_all(self, reason: str) -> None:
        """Stop all instances, with the calls that run on them. `reason`: why, for their callers."""
        for instance in [one for one in self.instances.values() if not one.exit_reason]:
            instance.exit_reason = reason
            self.drain(instance)
            if not instance.is_gone:
                self._lifecycle.interrupt(instance)
        self.stop_expired_suspended()

    @property
    def is_yielding(self) -> bool:
        """Whether an instance is draining or being stopped."""
        return bool(self._lifecycle.stopping) or any(
            instance.is_draining for instance in self.instances.values()
        )

    def settle_idle(self) -> None:
        """Record the idle time of instances for billing: those reserved by min_instances from their
        first idle moment, others after the free window."""
        reserved = self.min_instances if not self.is_retired else 0
        for n, instance in enumerate(self.instances.values()):
            instance.account.reserve(is_reserved=n < reserved, now_ns=time.monotonic_ns())
            instance.settle_idle()
        self.asleep.settle_gpus()

    @property
    def min_instances(self) -> int:
        """Number of instances that this activator keeps warm: its share of min_instances."""
        wanted = self.min_instances_of_all if self.is_kept else 0
        return self._gate.share(wanted)

    @property
    def min_instances_of_all(self) -> int:
        """Number of instances that all activators together keep warm now."""
        scaling = self.target.spec.scaling
        return max(scaling.min_instances, self.scheduled_min_instances if scaling.schedules else 0)

    def make_room(self, want: InstanceDemand | None, members: int) -> None:
        """Other activators were refused a start of this revision (None: no longer): drain one
        instance for them, if the fair shares require it."""
        if want is not None and (sleeping := self.asleep.instances()) and not self.is_yielding:
            self.stop_suspended(sleeping[0].id)
            return
        most = self._fleet.max_instances_of(self.target.key) if want is not None else None
        if self._rebalance is None:
            self._rebalance = RebalanceState()
        victim = self._rebalance.choose(self, want, members, self._clock(), most=most)
        if victim is not None:
            log.info("instance yielded to another activator instance=%s want=%s", victim.id, want)
            self.drain(victim)

    def retire(self) -> None:
        """Drain all instances of a revision without traffic, except one until `kept_until`, for a
        rollback."""
        self.is_retired = True
        live = sorted(self.live(), key=lambda instance: instance.in_flight)
        kept = live[:1] if self.is_kept and self._clock() < self.kept_until else []
        for instance in [instance for instance in self.instances.values() if instance not in kept]:
            instance.may_suspend = False
            self.drain(instance)
        self.stop_expired_suspended()

    def _stop(self, instance: Instance, reason: str) -> None:
        self.instances.pop(instance.id, None)
        self.frozen.untrack(instance)
        instance.settle_idle()
        sleeps = (
            self._fleet.can_sleep
            and may_sleep(self.target, instance)
            and self.is_kept
            and not self.is_retired
        )
        instance.mark_stopping()
        if sleeps:
            self.asleep.suspend(self.target, instance)
            self.request_scale_up(self._clock())
            return
        log.info("instance stops instance=%s reason=%s", instance.id, reason)
        self._lifecycle.stop(instance)
        self.request_scale_up(self._clock())  # it no longer counts towards max_instances

    # -- state -------------------------------------------------------------------------------------
    @property
    def starting(self) -> int:
        """Number of starts in progress, including resumes."""
        return self._lifecycle.starting + self.asleep.waking

    @property
    def blocked_starts(self) -> int:
        """Number of these starts that wait for a quota, or for room on the node."""
        return self._lifecycle.blocked_starts

    def is_starting(self, instance_id: str) -> bool:
        """Return whether this instance is being started, or is suspended."""
        return self._lifecycle.is_starting(instance_id) or self.asleep.has(instance_id)

    @property
    def in_flight(self) -> int:
        """Number of calls with a slot."""
        return sum(i.in_flight for i in self.instances.values())

    def expected_start_s(self) -> float | None:
        """Return the expected seconds of the next start, by the start kind that it will use; None
        when unknown."""
        return self.start_times.expected_s()

    @property
    def free_slots(self) -> int:
        """Number of calls that instances could take now."""
        return sum(max(0, i.capacity - i.in_flight) for i in self.live())

    def live(self) -> Iterator[Instance]:
        """Return the instances that take calls."""
        return (i for i in self.instances.values() if not i.is_gone and not i.is_draining)


def listen_to_none(target: CallTarget, instance: Instance) -> None:
    """Default of `ListenForCalls`: instances cannot call functions."""


def _phase_s(info: InstanceInfo, phase: str) -> float:
    """Return the seconds of one phase; 0 when it is missing or invalid."""
    ms = info.phases_ms.get(phase, 0.0)
    return ms / 1000 if 0 <= ms < math.inf else 0.0
