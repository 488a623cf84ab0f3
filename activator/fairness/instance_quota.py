"""The quotas `instances` and `gpus` of tenants and functions: counted over all revisions, what is
starting included.

A start beyond a quota waits while the tenant has instances that will be free: an idle one of
another revision is given up for it at once, and a revision without any gets a turn from the one
that has most. Where waiting is no use it is refused at once."""

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

LOOK_S = 1.0
"""Between looks while somebody waits: for turns, for callers that left, and for quotas that
changed."""
RETRY_S = 2.0
"""When a caller may come again after a quota of instances refused it: one of them may have ended by
then."""


class InstanceInventory(Protocol):
    """The instances of this activator (the Scaler)."""

    def tenures(self) -> Iterable[PreemptionCandidate]:
        """Those that take calls."""
        ...

    def give_up(self, instance_id: str) -> None:
        """No more calls for this one; it goes as soon as it is idle."""
        ...


class EmptyInventory:
    """An estate without instances."""

    def tenures(self) -> Iterable[PreemptionCandidate]:
        """See Estate."""
        return ()

    def give_up(self, instance_id: str) -> None:
        """See Estate."""


class InstanceQuota:
    """See the module. Owner: the event loop; decisions (`look`) do not await.

    Attributes:
        lines: of the starts that a quota holds up, by tenant; to read. None of a tenant of which
        none waits.
    """

    def __init__(self, terms: SharePolicy, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._terms = terms
        self._clock = clock
        self.estate: InstanceInventory = EmptyInventory()
        self._held: dict[str, tuple[tuple[str, ...], int]] = {}
        self._instances: Counter[str] = Counter()
        self._gpus: Counter[str] = Counter()
        self.lines: dict[str, FairQueue[StartRequest]] = {}
        self._leaving: set[str] = set()
        self._ticks = PeriodicTimer(self.look_everywhere, every_s=LOOK_S)
        self._soon = Debouncer(self.look_everywhere)

    def __repr__(self) -> str:
        return f"<InstanceQuota {len(self._held)} instances, {self.waiting} starts wait>"

    @property
    def waiting(self) -> int:
        """Starts that a quota holds up."""
        return sum(map(len, self.lines.values()))

    def count(self, tenant: str) -> tuple[int, int]:
        """Instances and GPUs of a tenant."""
        return self._instances[tenant], self._gpus[tenant]

    async def enter(self, ask: StartRequest) -> None:
        """Be counted, as soon as the quotas allow. Raises OverQuota where waiting is no use,
        StartCancelled."""
        refusal = self.refusal(ask)
        if refusal is None:
            self.hold(ask.id, ask.target)
            return
        if not self._instances[ask.tenant] or refusal.detail["limit"] < _amount(ask, refusal):
            raise refusal
        if not ask.is_needed():
            raise StartCancelled
        line = self.lines.setdefault(ask.tenant, FairQueue())
        ask.since = self._clock()
        self._ticks.begin()
        try:
            own = replace(ask.rank, tenant=ask.target.name, weight=1)
            await ask.wait_in(line, own, cost=1.0, look=self.look_soon)
        finally:
            if not line and self.lines.get(ask.tenant) is line:
                del self.lines[ask.tenant]

    def hold(self, instance_id: str, target: CallTarget) -> None:
        """It counts from now on."""
        if instance_id not in self._held:
            gpus = target.footprint.gpu_count if target.footprint.gpu else 0
            names = target.tenant, target.name
            self._held[instance_id] = names, gpus
            self._instances.update(names)
            for name in names:
                self._gpus[name] += gpus

    def left(self, instance_id: str) -> None:
        """It is gone, or never came."""
        held = self._held.pop(instance_id, None)
        if held is None:
            return
        self._leaving.discard(instance_id)
        names, gpus = held
        self._instances.subtract(names)
        for name in names:
            self._gpus[name] -= gpus
            if not self._instances[name]:
                del self._instances[name], self._gpus[name]
        self.look_soon()

    def refusal(self, ask: StartRequest) -> errors.OverQuota | None:
        """The quota that one more would be over; None when there is room."""
        plan, own = self._terms.plan_of(ask.tenant), self._terms.quotas_of(ask.target.name)
        for of, name, quotas in (("tenant", ask.tenant, plan), ("function", ask.target.name, own)):
            for quota, limit, held, more in (
                ("instances", quotas.instances, self._instances[name], 1),
                ("gpus", quotas.gpus, self._gpus[name], ask.gpus),
            ):
                if limit is not None and more and held + more > limit:
                    return errors.OverQuota(
                        f"the {of} has {held} of {limit} {quota} in use, and "
                        f"{ask.target.app}/{ask.target.function} needs {more} more",
                        retry_after_s=RETRY_S,
                        quota=quota,
                        of=of,
                        limit=limit,
                    )
        return None

    def look_soon(self, delay_s: float = 0.0) -> None:
        """Look once for all that happens until then."""
        if self.lines:
            self._soon.ask(delay_s)

    def look(self, tenant: str) -> None:
        """Let through whoever has room now, and make room where that is fair."""
        line = self.lines.get(tenant)
        if line is None:
            return
        cancel_unneeded(line)
        while (fitting := line.pop(lambda ask: self._fits(ask, line))) is not None:
            if fitting.is_waiting:
                self.hold(fitting.id, fitting.target)
                fitting.go_on()
        self._make_room(tenant, [ask for ask in line if ask.is_waiting])

    def _fits(self, ask: StartRequest, line: FairQueue[StartRequest]) -> bool:
        """Those go first for whom an instance had to go; who does not wait any more is only taken
        out."""
        if not ask.is_waiting:
            return True
        return self.refusal(ask) is None and (
            ask.is_first or not any(other.is_first and other.is_waiting for other in line)
        )

    def look_everywhere(self) -> bool:
        """Time has passed, or a plan changed. Whether anybody waits."""
        for tenant in list(self.lines):
            self.look(tenant)
        return bool(self.lines)

    def close(self) -> None:
        """No more looks."""
        self._ticks.close()
        self._soon.close()

    def _make_room(self, tenant: str, asks: list[StartRequest]) -> None:
        now = self._clock()
        for ask in asks:
            refusal = self.refusal(ask)
            ask.obstacle = refusal or ask.obstacle
            if ask.is_first or refusal is None:
                continue
            of = ask.target.name if refusal.detail["of"] == "function" else None
            known = (
                tenure
                for tenure in self.estate.tenures()
                if tenure.tenant == tenant
                and of in (None, tenure.function)
                and tenure.id not in self._leaving
            )
            victim = pick_within_quota(
                known,
                ask.target.key,
                waited_s=now - ask.since,
                needs_gpu=refusal.detail["quota"] == "gpus",
            )
            if victim is not None:
                ask.is_first = True
                self._leaving.add(victim.id)
                self.estate.give_up(victim.id)


def _amount(ask: StartRequest, refusal: errors.OverQuota) -> int:
    return ask.gpus if refusal.detail["quota"] == "gpus" else 1
