"""The quotas `instances` and `gpus` of tenants and functions, counted over all revisions including
starting instances.

A start beyond a quota waits while the tenant has instances that will become free: an idle instance
of another revision is released for it at once, and a revision without instances gets one from the
revision that has most. Where waiting cannot help, the start is refused at once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from activator.fairness.fair_queue import FairQueue
from activator.fairness.preemption import PreemptionCandidate, pick_within_quota
from activator.fairness.share_policy import SharePolicy
from activator.fairness.start_request import StartCancelled, StartRequest, cancel_unneeded
from activator.fairness.timers import Debouncer, PeriodicTimer
from activator.routing.route_table import CallTarget
from pilotlight import errors

CHECK_S = 1.0
"""Interval between checks while starts wait: for turns, for callers that left, and for changed
quotas."""
RETRY_S = 2.0
"""When to retry after a quota of instances refused a call: one of them may have ended by then."""


class InstanceInventory(Protocol):
    """The instances of this activator (the autoscaler)."""

    def tenures(self) -> Iterable[PreemptionCandidate]:
        """The instances that accept calls."""

    def give_up(self, instance_id: str) -> None:
        """Drain an instance: no more calls, and it ends as soon as it is idle."""


class EmptyInventory:
    """An inventory without instances."""

    def tenures(self) -> Iterable[PreemptionCandidate]:
        """Return no instances."""
        return ()

    def give_up(self, instance_id: str) -> None:
        """Do nothing."""


class InstanceQuota:
    """Enforces instance quotas on starts. Owner: the event loop; decisions (`dispatch`) do not
    await.

    Attributes:
        lines: the starts that wait for a quota, by tenant; read-only. Tenants without waiting
            starts have no entry."""

    def __init__(self, terms: SharePolicy, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._terms = terms
        self._clock = clock
        self.inventory: InstanceInventory = EmptyInventory()
        self._held: dict[str, tuple[tuple[str, ...], int]] = {}
        self._instances: Counter[str] = Counter()
        self._gpus: Counter[str] = Counter()
        self.lines: dict[str, FairQueue[StartRequest]] = {}
        self._draining: set[str] = set()
        self._ticks = PeriodicTimer(self.dispatch_all, every_s=CHECK_S)
        self._soon = Debouncer(self.dispatch_all)

    def __repr__(self) -> str:
        return f"<InstanceQuota {len(self._held)} instances, {self.waiting} starts wait>"

    @property
    def waiting(self) -> int:
        """Number of starts that wait for a quota."""
        return sum(map(len, self.lines.values()))

    def count(self, tenant: str) -> tuple[int, int]:
        """Number of instances and GPUs of a tenant."""
        return self._instances[tenant], self._gpus[tenant]

    async def admit(self, request: StartRequest) -> None:
        """Count the start as soon as the quotas allow it. Raises OverQuota where waiting cannot
        help, StartCancelled."""
        refusal = self.refusal(request)
        if refusal is None:
            self.add(request.id, request.target)
            return
        if not self._instances[request.tenant] or refusal.detail["limit"] < _amount(
            request, refusal
        ):
            raise refusal
        if not request.is_needed():
            raise StartCancelled
        line = self.lines.setdefault(request.tenant, FairQueue())
        request.since = self._clock()
        self._ticks.begin()
        try:
            own = replace(request.rank, tenant=request.target.name, weight=1)
            await request.wait_in(line, own, cost=1.0, on_queued=self.schedule_dispatch)
        finally:
            if not line and self.lines.get(request.tenant) is line:
                del self.lines[request.tenant]

    def add(self, instance_id: str, target: CallTarget) -> None:
        """Count an instance."""
        if instance_id not in self._held:
            gpus = target.footprint.gpu_count if target.footprint.gpu else 0
            names = target.tenant, target.name
            self._held[instance_id] = names, gpus
            self._instances.update(names)
            for name in names:
                self._gpus[name] += gpus

    def remove(self, instance_id: str) -> None:
        """Stop counting an instance that has ended or failed to start."""
        held = self._held.pop(instance_id, None)
        if held is None:
            return
        self._draining.discard(instance_id)
        names, gpus = held
        self._instances.subtract(names)
        for name in names:
            self._gpus[name] -= gpus
            if not self._instances[name]:
                del self._instances[name], self._gpus[name]
        self.schedule_dispatch()

    def refusal(self, request: StartRequest) -> errors.OverQuota | None:
        """The error for the quota that one more start would exceed; None when there is room."""
        plan, own = self._terms.plan_of(request.tenant), self._terms.quotas_of(request.target.name)
        for of, name, quotas in (
            ("tenant", request.tenant, plan),
            ("function", request.target.name, own),
        ):
            for quota, limit, held, more in (
                ("instances", quotas.instances, self._instances[name], 1),
                ("gpus", quotas.gpus, self._gpus[name], request.gpus),
            ):
                if limit is not None and more and held + more > limit:
                    return errors.OverQuota(
                        f"the {of} has {held} of {limit} {quota} in use, and "
                        f"{request.target.app}/{request.target.function} needs {more} more",
                        retry_after_s=RETRY_S,
                        quota=quota,
                        of=of,
                        limit=limit,
                    )
        return None

    def schedule_dispatch(self, delay_s: float = 0.0) -> None:
        """Schedule one check of the waiting starts. Calls in between are merged."""
        if self.lines:
            self._soon.schedule(delay_s)

    def dispatch(self, tenant: str) -> None:
        """Admit the waiting starts that fit now, and make room for the others where that is
        fair."""
        line = self.lines.get(tenant)
        if line is None:
            return
        cancel_unneeded(line)
        while (fitting := line.pop(lambda request: self._fits(request, line))) is not None:
            if fitting.is_waiting:
                self.add(fitting.id, fitting.target)
                fitting.admit()
        self._make_room(tenant, [request for request in line if request.is_waiting])

    def _fits(self, request: StartRequest, line: FairQueue[StartRequest]) -> bool:
        """Whether a start may leave the queue. Starts for which an instance was released go first;
        starts that no longer wait are removed."""
        if not request.is_waiting:
            return True
        return self.refusal(request) is None and (
            request.is_first or not any(other.is_first and other.is_waiting for other in line)
        )

    def dispatch_all(self) -> bool:
        """Check all tenants, because time has passed or a plan changed. Returns whether starts
        wait."""
        for tenant in list(self.lines):
            self.dispatch(tenant)
        return bool(self.lines)

    def close(self) -> None:
        """Stop the checks."""
        self._ticks.close()
        self._soon.close()

    def _make_room(self, tenant: str, requests: list[StartRequest]) -> None:
        now = self._clock()
        for request in requests:
            refusal = self.refusal(request)
            request.obstacle = refusal or request.obstacle
            if request.is_first or refusal is None:
                continue
            of = request.target.name if refusal.detail["of"] == "function" else None
            known = (
                tenure
                for tenure in self.inventory.tenures()
                if tenure.tenant == tenant
                and of in (None, tenure.function)
                and tenure.id not in self._draining
            )
            victim = pick_within_quota(
                known,
                request.target.key,
                waited_s=now - request.since,
                needs_gpu=refusal.detail["quota"] == "gpus",
            )
            if victim is not None:
                request.is_first = True
                self._draining.add(victim.id)
                self.inventory.give_up(victim.id)


def _amount(request: StartRequest, refusal: errors.OverQuota) -> int:
    return request.gpus if refusal.detail["quota"] == "gpus" else 1
