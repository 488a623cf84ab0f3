"""The autoscaler loop: measure, decide, apply. It owns the throttlers.

Each second the load of every active revision is recorded in its windows. Each two seconds
(Knative's tick) `decider.decide` computes how many instances there should be, and the difference is
started or drained. A revision without instances, calls or starts is dropped, so thousands of
functions at zero cost nothing here. Calls do not wait for a tick: see
`Throttler.request_scale_up`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping

from activator.autoscaler.idle_histogram import IdleHistograms
from activator.autoscaler.revision_scaler import RevisionScaler
from activator.autoscaler.scale_down import Candidate, choose_victims
from activator.autoscaler.scheduled_floors import ScheduledFloors
from activator.autoscaler.suspended_tenants import SuspendedTenants
from activator.balancing.fleet import Fleet
from activator.balancing.instance import Instance
from activator.balancing.preemptible_instances import PreemptibleInstances
from activator.balancing.throttler import Throttler
from activator.coordination.state import HeartbeatReply
from activator.fairness.start_admission import StartAdmission
from activator.resilience.breaker import State
from activator.routing.route_table import CallTarget, RouteTable
from pilotlight.core.background_tasks import BackgroundTasks
from snapshotter import errors as agent_errors
from snapshotter.types import (
    RevisionKey,
)

log = logging.getLogger(__name__)

RECORD_S = 1.0
"""A window's bucket (Knative: config.BucketSize)."""
DECIDE_EVERY = 2
"""Ticks of RECORD_S between decisions (Knative: 2 s)."""
SETTLE_EVERY = 60
"""Ticks between settlements of idle time: the idle cost of an instance is in the ledger within a
minute."""
DROP_S = 30.0
"""A revision at zero is dropped after this long without a call: its windows would be empty
anyway."""


def _always(_target: CallTarget) -> bool:
    """Default of `may_run`: there are no budgets."""
    return True


def _unbatched(_key: str) -> None:
    """Default of `occupancy`: no function gathers calls."""


class AutoscalerLoop:
    """All throttlers of this activator. Owner: the event loop.

    `may_run`: False for a function whose budget is spent: nothing is started or kept for it without
    a call. `occupancy`: how full the recent batches of a revision (by `CallTarget.key`) were, 0 to
    1; None = there were none. `freeze_idle_s`: after how long instances without calls are frozen;
    None = never.

    Attributes:
        gate: admits the throttlers' starts, and may drain their instances to make room.
        revisions: the active ones, by key.
        floors: of functions with scaling schedules.
        suspended_tenants: ends what runs for them, and for deleted ones.
        reconciled: set once `InstanceReconciler` has adopted the instances of this activator."""

    def __init__(
        self,
        *,
        table: RouteTable,
        fleet: Fleet,
        make_throttler: Callable[[CallTarget], Throttler],
        gate: StartAdmission | None = None,
        may_run: Callable[[CallTarget], bool] = _always,
        occupancy: Callable[[str], float | None] = _unbatched,
        freeze_idle_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table = table
        self._fleet = fleet
        self._make_throttler = make_throttler
        self._clock = clock
        self.revisions: dict[str, RevisionScaler] = {}
        self._may_run = may_run
        self._occupancy = occupancy
        self._freeze_idle_s = freeze_idle_s
        self.gate = gate or StartAdmission(clock=clock)
        self._holdings = PreemptibleInstances(
            lambda: [scaled.throttler for scaled in self.revisions.values()], clock=clock
        )
        self.gate.serve(self._holdings)
        self._pauses = IdleHistograms()
        self.floors = ScheduledFloors(table)
        self.suspended_tenants = SuspendedTenants(
            table.tenants.is_suspended, table.tenants.is_deleted
        )
        self._drops = BackgroundTasks()
        self.reconciled = asyncio.Event()
        table.on_function = self.route_changed

    def __repr__(self) -> str:
        return f"<AutoscalerLoop {len(self.revisions)} active revisions>"

    def throttler_of(self, target: CallTarget) -> Throttler:
        """The throttler of a revision, created when it is first called."""
        scaled = self.revisions.get(target.key)
        if scaled is None:
            name = f"{target.tenant}/{target.environment}/{target.app}/{target.function}"
            scaled = self.revisions[target.key] = RevisionScaler(
                name, self._make_throttler(target), self._clock(), self._pauses
            )
        return scaled.throttler

    def active(self, key: str) -> Throttler | None:
        """The throttler of a called revision, by its key; None otherwise."""
        scaled = self.revisions.get(key)
        return scaled.throttler if scaled is not None else None

    # -- changes of functions ----------------------------------------------------------------------
    def route_changed(self, name: str, left: frozenset[str] = frozenset()) -> None:
        """Handle a function that was deployed, stopped or removed: drain revisions without traffic,
        create the ones that need instances.

        `left`: keys of the revisions that lost their last traffic. Their Templates are dropped with
        their last instance. The first reconciliation handles changes from before it."""
        self.floors.forget(name)
        targets = {target.key: target for target in self._table.targets_of(name)}
        for key, scaled in self.revisions.items():
            if scaled.name == name and key in targets:
                scaled.throttler.is_retired = False  # rolled back to while its last calls ended
                scaled.throttler.retarget(targets[key])
            elif scaled.name == name:
                if not scaled.throttler.is_retired:
                    scaled.throttler.kept_until = self._clock() + self._table.previous_retention_s(
                        name
                    )
                scaled.throttler.retire()
        for key in left - self.revisions.keys():
            self.drop_template(key)
        for target in targets.values():
            if target.spec.scaling.min_instances and self.reconciled.is_set():
                self.apply(self.scaler_of(target), self._clock())

    def scaler_of(self, target: CallTarget) -> RevisionScaler:
        self.throttler_of(target)
        return self.revisions[target.key]

    def drop_template(self, key: str) -> None:
        """Drop a Template in a task. If it fails, the next reconciliation repeats it; if a call
        comes for it after all, it starts COLD once."""
        if not self.reconciled.is_set():
            return

        async def drop() -> None:
            try:
                await self._fleet.drop_template(RevisionKey(key))
            except agent_errors.SnapshotterError as e:
                log.warning("template stays revision=%s error=%s", key, e)

        self._drops.run(drop(), name=f"drop template {key}")

    def has_instance(self, instance_id: str) -> bool:
        """Whether a throttler has the instance, or is starting it."""
        throttlers = [scaled.throttler for scaled in self.revisions.values()]
        return any(t.is_starting(instance_id) or instance_id in t.instances for t in throttlers)

    def make_room(self, pulse: HeartbeatReply) -> None:
        """Release instances that other activators lack, where that is fair."""
        for key, scaled in self.revisions.items():
            scaled.throttler.make_room(pulse.wants.get(key), len(pulse.members))
        self._holdings.make_room(pulse, self.gate.terms.plan_of)

    # -- the loop ----------------------------------------------------------------------------------
    async def run(self) -> None:
        """Record and decide, until cancelled. Begins after the first reconciliation, because
        instances that look missing before may exist."""
        await self.reconciled.wait()
        for name in self._table.functions.kept_warm():
            self.route_changed(name)
        tick = 0
        while True:
            await asyncio.sleep(RECORD_S)
            tick += 1
            now = self._clock()
            self.record(now)
            if tick % DECIDE_EVERY == 0:
                self.apply_schedules()
            for scaled in list(self.revisions.values()):
                self.suspended_tenants.end_calls(scaled.throttler, now)
                scaled.throttler.eject_slow_instance(now)
                scaled.throttler.stop_expired_suspended(now)
                if self._freeze_idle_s is not None:
                    scaled.throttler.freeze_idle(now, self._freeze_idle_s)
                if tick % DECIDE_EVERY == 0:
                    self.apply(scaled, now)
                if tick % SETTLE_EVERY == 0:
                    scaled.throttler.settle_idle()

    def record(self, now: float) -> None:
        """Record every revision's load since the last time. The stable revision of a rollout is
        scaled as if it got all calls of its function, so that there is capacity when the candidate
        is rolled back. Mirrored calls do not count."""
        loads = {key: scaled.measure(now) for key, scaled in self.revisions.items()}
        for key, scaled in self.revisions.items():
            load = loads[key]
            if scaled.throttler.target.is_stable:
                load = sum(
                    loads[other]
                    for other, beside in self.revisions.items()
                    if beside.name == scaled.name and not beside.is_shadow
                )
            scaled.record(now, load)

    def apply_schedules(self) -> None:
        """Raise and lower the floors of functions whose scaling schedules have begun or ended. What
        was idle until then is settled, because it is billed as reserved only within a window."""
        for target, floor in self.floors.changes():
            if floor or target.key in self.revisions:
                throttler = self.scaler_of(target).throttler
                if throttler.scheduled_min_instances != floor:
                    throttler.scheduled_min_instances = floor
                    throttler.settle_idle()

    def apply(self, scaled: RevisionScaler, now: float) -> None:
        """Decide how many instances a revision should have, and start or stop the difference."""
        throttler = scaled.throttler
        if throttler.is_retired:
            throttler.retire()
            self._drop_if_idle(scaled, now)
            return
        throttler.is_kept = self._may_run(
            throttler.target
        ) and not self._table.tenants.is_suspended(throttler.target.tenant)
        if not throttler.is_kept:
            throttler.drain_idle()
            self._drop_if_idle(scaled, now)
            return
        decision = scaled.decide(now, self._occupancy(throttler.target.key))
        if not decision.valid:
            self._drop_if_idle(scaled, now)
            return
        if decision.starts and not throttler.is_start_paused:
            throttler.start(decision.starts)
        if decision.stops:
            live = {i.id: i for i in throttler.live()}
            candidates = [
                Candidate(
                    id=i.id,
                    in_flight=i.in_flight,
                    idle_s=0.0 if i.in_flight else now - i.idle_since,
                )
                for i in live.values()
            ]
            for victim in choose_victims(candidates, decision.stops):
                throttler.suspend_or_stop(live[victim])
        self._drop_if_idle(scaled, now)

    def _drop_if_idle(self, scaled: RevisionScaler, now: float) -> None:
        throttler = scaled.throttler
        is_kept = throttler.is_kept and not throttler.is_retired and throttler.min_instances_of_all
        is_busy = (
            throttler.instances
            or len(throttler.asleep)
            or throttler.waiting
            or throttler.starting
            or is_kept
        )
        if not throttler.is_retired and now - throttler.load.last_call_at < DROP_S:
            return
        if not is_busy:
            self.revisions.pop(throttler.target.key, None)
            if throttler.is_retired:
                self.drop_template(throttler.target.key)

    def throttlers(self) -> list[Throttler]:
        """The throttlers of all active revisions."""
        return [scaled.throttler for scaled in list(self.revisions.values())]

    def wanted(self, key: str) -> int:
        """Instances of a revision that the signals of the last decision call for, without the
        delays that keep more; 0 before the first one."""
        scaled = self.revisions.get(key)
        decision = scaled.decision if scaled is not None else None
        return decision.wanted if decision is not None else 0

    def concurrency(self) -> Mapping[str, float]:
        """Average concurrent calls in the last second, by revision key."""
        return {key: scaled.concurrency for key, scaled in self.revisions.items()}

    def states(self) -> Mapping[tuple[str, str, str, str], int]:
        """Number of instances and calls by (tenant, app, function, state), for metrics."""
        counts: Counter[tuple[str, str, str, str]] = Counter()
        for scaled in self.revisions.values():
            target, throttler = scaled.throttler.target, scaled.throttler
            labels = (target.tenant, target.app, target.function)
            counts[*labels, "asleep"] += len(throttler.asleep)
            for instance in throttler.instances.values():
                counts[*labels, _state_of(instance)] += 1
            counts[*labels, "starting"] += throttler.starting
            counts[*labels, "circuit_open"] += (
                throttler.health is not None and throttler.health.breaker.state is not State.CLOSED
            )
            counts[*labels, "starts_held_up"] += throttler.blocked_starts
            counts[*labels, "calls_waiting"] += throttler.waiting
            counts[*labels, "calls_in_flight"] += throttler.in_flight
        return counts

    async def aclose(self) -> None:
        """Close every throttler. Instances keep running: they belong to the node, and the next
        activator with this name adopts them."""
        for scaled in self.revisions.values():
            scaled.throttler.settle_idle()
        self.gate.close()
        await self._drops.cancel()
        await asyncio.gather(*(scaled.throttler.aclose() for scaled in self.revisions.values()))


def _state_of(instance: Instance) -> str:
    if instance.is_draining:
        return "draining"
    if instance.in_flight:
        return "busy"
    return "frozen" if instance.is_frozen else "idle"
