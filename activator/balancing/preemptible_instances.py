"""The instances of all throttlers as candidates for preemption by quotas and by other
activators."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator

from activator.balancing.instance import Instance
from activator.balancing.rebalancing import RebalanceRequest, pick_instance_to_yield
from activator.balancing.throttler import Throttler
from activator.coordination.state import HeartbeatReply, InstanceDemand
from activator.fairness.preemption import PreemptionCandidate, value_per_byte
from activator.fairness.start_admission import GPUS, INSTANCES
from pilotlight.spec.identifiers import Priority
from pilotlight.spec.quotas import Plan
from snapshotter.types import GpuDevice, InstanceInfo

log = logging.getLogger(__name__)

ASLEEP_S = 1e9
"""Idle time of suspended instances in the ordering of candidates: longer than any running
instance."""


class PreemptibleInstances:
    """Preemption candidates (`fairness.preemption`) over the throttlers of one activator. Owner:
    the event loop."""

    def __init__(
        self,
        throttlers: Callable[[], Iterable[Throttler]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._throttlers = throttlers
        self._clock = clock
        self._starved_since: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<PreemptibleInstances {sum(1 for _ in self.tenures())} instances>"

    def tenures(self) -> Iterator[PreemptionCandidate]:
        """Yield all instances as preemption candidates."""
        now = self._clock()
        for throttler in self._throttlers():
            live = sorted(
                throttler.live(), key=lambda instance: (instance.in_flight, instance.idle_since)
            )
            for instance in throttler.asleep.instances():  # no call uses these: preempted first
                yield _candidate(
                    throttler, instance, now, idle_s=ASLEEP_S, is_spare=True, is_asleep=True
                )
            spare = len(live) - (0 if throttler.is_retired else throttler.min_instances)
            for n, instance in enumerate(live):
                idle_s = None if instance.in_flight else now - instance.idle_since
                yield _candidate(throttler, instance, now, idle_s=idle_s, is_spare=n < spare)

    def give_up(self, instance_id: str) -> None:
        """Drain or stop one instance."""
        for throttler in self._throttlers():
            instance = throttler.instances.get(instance_id)
            if instance is not None:
                throttler.drain(instance)
            else:
                throttler.stop_suspended(instance_id)

    def make_room(self, pulse: HeartbeatReply, plan_of: Callable[[str], Plan]) -> None:
        """Other activators were refused an instance by a tenant's quota: yield one, if the fair
        shares require it."""
        self._starved_since = {
            key: since for key, since in self._starved_since.items() if key in pulse.wants
        }
        for key, want in pulse.wants.items():
            kind, _, tenant = key.partition(":")
            if kind not in (INSTANCES, GPUS):
                continue
            plan = plan_of(tenant)
            own = [
                throttler for throttler in self._throttlers() if throttler.target.tenant == tenant
            ]
            if kind == GPUS:
                own = [throttler for throttler in own if throttler.target.footprint.gpu]
            limit = plan.gpus if kind == GPUS else plan.instances
            if limit is not None and not any(throttler.is_yielding for throttler in own):
                self._yield_one(key, want, own, limit=limit, members=len(pulse.members))

    def _yield_one(
        self, key: str, want: InstanceDemand, own: list[Throttler], *, limit: int, members: int
    ) -> None:
        now = self._clock()
        claim = RebalanceRequest(
            want=want,
            starved_s=now - self._starved_since.setdefault(key, now) if want.starving else 0.0,
            members=members,
            min_instances=sum(throttler.min_instances for throttler in own),
            max_instances=limit,
            waiting=sum(throttler.waiting for throttler in own),
        )
        victim = pick_instance_to_yield(
            [instance for throttler in own for instance in throttler.live()], claim, now
        )
        if victim is not None:
            log.info(
                "instance yielded to another activator instance=%s quota=%s want=%s",
                victim.id,
                key,
                want,
            )
            self._starved_since.pop(key, None)
            self.give_up(victim.id)


def _candidate(
    throttler: Throttler,
    instance: Instance,
    now: float,
    *,
    idle_s: float | None,
    is_spare: bool,
    is_asleep: bool = False,
) -> PreemptionCandidate:
    target = throttler.target
    return PreemptionCandidate(
        id=instance.id,
        tenant=target.tenant,
        key=target.key,
        function=target.name,
        memory_bytes=target.launch.memory_bytes,
        gpus=target.footprint.gpu_count if target.footprint.gpu else 0,
        devices=_devices(instance.info),
        idle_s=idle_s,
        in_flight=0 if is_asleep else instance.in_flight,
        is_spare=is_spare,
        is_asleep=is_asleep,
        value=_value(throttler, instance, now),
        priority=target.spec.priority or Priority.STANDARD,
    )


def _value(throttler: Throttler, instance: Instance, now: float) -> float:
    return value_per_byte(
        _devices(instance.info),
        calls=instance.calls,
        lived_s=now - instance.started_at,
        start_s=throttler.expected_start_s(),
    )


def _devices(info: InstanceInfo) -> tuple[GpuDevice, ...]:
    return info.gpus.devices if info.gpus is not None else ()
