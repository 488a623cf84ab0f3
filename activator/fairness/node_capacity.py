"""Memory on the node: starts that do not fit wait for it in a fair order, and idle instances are
released for them.

The node agent decides what fits, because only it knows all claims. No start waits here until the
agent has refused one. From then on starts wait in a FairQueue, whose costs are bytes, and are
admitted as memory becomes free: the unclaimed memory that the agent reported, less what was
admitted since, plus what has been released. `preemption` selects the instances to release. Other
changes on the node are not visible here, so the first start in the queue asks the agent again every
RETRY_S. A start does not wait when waiting cannot help (a node for other tenants, more than the
node has). For missing GPUs, `gpu_capacity` releases instances."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from activator.fairness.fair_queue import Entry, FairQueue
from activator.fairness.gpu_capacity import GpuCapacity
from activator.fairness.instance_quota import EmptyInventory, InstanceInventory
from activator.fairness.preemption import (
    PreemptionCandidate,
    ResourceShortfall,
    TenantUsage,
    victims,
)
from activator.fairness.share_policy import SharePolicy
from activator.fairness.start_request import StartCancelled, StartRequest, cancel_unneeded
from activator.fairness.timers import Debouncer, PeriodicTimer
from activator.routing.route_table import CallTarget
from pilotlight import errors
from snapshotter.errors import NoCapacity

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Interval between checks while starts wait: for turns, for callers that left, and for memory
released by others on the node."""


class NodeCapacity:
    """Admits starts to the node's memory. Owner: the event loop; decisions (`dispatch`) do not
    await.

    Attributes:
        places: the starts that wait for memory; read-only.
        gpu_pause_s: interval between two requests for a GPU that is becoming free."""

    def __init__(self, terms: SharePolicy, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._terms = terms
        self._clock = clock
        self.inventory: InstanceInventory = EmptyInventory()
        self._line: FairQueue[StartRequest] = FairQueue()
        self.places: Mapping[Entry[StartRequest], None] = self._line.places
        self._held: dict[str, tuple[str, int]] = {}
        self._use: Counter[str] = Counter()
        self._draining: dict[str, bool] = {}
        self._gpus = GpuCapacity(terms, lambda: self.inventory, clock=clock)
        self.gpu_pause_s = RETRY_S
        self._free_bytes = 0
        self._total_bytes = 0
        self._ticks = PeriodicTimer(self.retry, every_s=RETRY_S)
        self._soon = Debouncer(self.dispatch)

    def __repr__(self) -> str:
        return (
            f"<NodeCapacity {sum(self._use.values()) >> 20} MiB of {len(self._use)} tenants, "
            f"{len(self._line)} starts wait>"
        )

    @property
    def waiting(self) -> int:
        """Number of starts that wait for memory."""
        return len(self._line)

    async def wait_turn(self, request: StartRequest) -> None:
        """Wait behind the starts that already wait, before the node is asked. Raises
        StartCancelled."""
        if not self._line:
            self._add(request.id, request.target)
            return
        if not request.is_needed():
            raise StartCancelled
        await self._wait(request)

    async def wait_for_room(
        self, request: StartRequest, refusal: NoCapacity, answer: errors.PilotlightError
    ) -> None:
        """Wait until the node may be asked again after it refused a start. `answer`: the error for
        callers at their deadline.

        Raises the refusal where waiting cannot help, StartCancelled."""
        self._drop(request.id)
        detail = refusal.detail
        if detail.get("resource") == "gpu" and not request.is_needed():
            raise StartCancelled  # no instance is released for it
        if detail.get("resource") == "gpu" and self._gpus.make_room(request, detail):
            request.obstacle = answer
            # no event reports that a GPU's memory is free: ask the node again
            await asyncio.sleep(self.gpu_pause_s)
            request.obstacle = None
            self._add(request.id, request.target)
            return
        if detail.get("resource") != "memory" or request.memory_bytes > detail.get("total", 0):
            raise refusal
        self._total_bytes = int(detail["total"])
        self._free_bytes = self._total_bytes - int(detail["claimed"])
        if not request.is_needed():
            raise StartCancelled
        await self._wait(request, answer)

    async def _wait(
        self, request: StartRequest, answer: errors.PilotlightError | None = None
    ) -> None:
        request.since = self._clock() if answer is None else min(request.since, self._clock())
        request.obstacle = answer or _no_room(request)
        self._ticks.begin()
        await request.wait_in(
            self._line,
            request.rank,
            cost=float(max(1, request.memory_bytes)),
            on_queued=self.schedule_dispatch,
            is_first=answer is not None,
        )

    # -- accounting --------------------------------------------------------------------------------
    def adopt(self, instance_id: str, target: CallTarget) -> None:
        """Count an instance that existed before (adopted)."""
        if instance_id not in self._held:
            self._add(instance_id, target)

    def release(self, instance_id: str) -> None:
        """Stop counting an instance that has ended or failed to start."""
        freed = self._drop(instance_id)
        self._draining.pop(instance_id, None)
        if freed and self._line:
            self._free_bytes += freed
            self.schedule_dispatch()

    def _add(self, instance_id: str, target: CallTarget) -> None:
        self._held[instance_id] = target.tenant, target.launch.memory_bytes
        self._use[target.tenant] += target.launch.memory_bytes
        if target.launch.gpu:
            self._gpus.add(instance_id, target)

    def _drop(self, instance_id: str) -> int:
        self._gpus.remove(instance_id)
        tenant, held = self._held.pop(instance_id, ("", 0))
        if held:
            self._use[tenant] -= held
            if not self._use[tenant]:
                del self._use[tenant]
        return held

    # -- admission ---------------------------------------------------------------------------------
    def schedule_dispatch(self, delay_s: float = 0.0) -> None:
        """Schedule one check of the waiting starts. Calls in between are merged."""
        if self._line:
            self._soon.schedule(delay_s)

    def dispatch(self) -> None:
        """Admit the waiting starts that fit now, in order, and make room for the others where that
        is fair."""
        cancel_unneeded(self._line)
        promised = Counter[str]()
        for request in self._line:
            promised[request.tenant] += (
                request.memory_bytes if request.is_first and request.is_waiting else 0
            )
        while (
            fitting := self._line.pop(
                lambda request: not request.is_waiting or self._shortfall(request, promised) <= 0
            )
        ) is not None:
            promised[fitting.tenant] -= (
                fitting.memory_bytes if fitting.is_first and fitting.is_waiting else 0
            )
            self._admit(fitting)
        self._make_room(promised)

    def make_room_for(self, tenant: str, detail: Mapping[str, Any]) -> None:
        """Release idle instances, where that is fair, for another activator's refused start of this
        tenant (event `room_wanted`).

        One round at a time: the other activator asks again until its start is admitted."""
        if self._draining:
            return
        lacking = int(detail["asked"]) - int(detail["free"])
        need = ResourceShortfall(
            tenant=tenant,
            asked_bytes=int(detail["asked"]),
            lacking_bytes=lacking,
            waited_s=0.0,
            may_take_busy=False,
        )
        use = {str(name): int(held) for name, held in detail["claims"].items()}
        weights = {name: self._terms.plan_of(name).weight for name in {*use, tenant}}
        balance = TenantUsage(
            use=use,
            weights=weights,
            floors=self._terms.reserved(),
            total=int(detail["total"]),
        )
        self._release_instances(victims(self.inventory.tenures(), need, balance), tenant)

    def _admit(self, request: StartRequest) -> None:
        if request.is_waiting:
            self._add(request.id, request.target)
            self._free_bytes -= request.memory_bytes
            request.admit()

    def _shortfall(self, request: StartRequest, promised: Counter[str]) -> int:
        """Bytes that must become free before the start fits, beyond what is promised to other
        starts and reserved for other tenants."""
        others = promised.total() - (request.memory_bytes if request.is_first else 0)
        floors = self._terms.reserved()
        kept = sum(
            max(0, floor - self._use[tenant])
            for tenant, floor in floors.items()
            if tenant != request.tenant
        )
        return request.memory_bytes + others + kept - self._free_bytes

    def _make_room(self, promised: Counter[str]) -> None:
        """Release instances for waiting starts, by priority and then by the tenant's usage for its
        weight, until nothing more can be released for a tenant."""
        tenures: list[PreemptionCandidate] | None = None
        in_vain: set[str] = set()
        for request in sorted(
            self._line,
            key=lambda request: (
                request.rank.priority.rank,
                self._use[request.tenant] / request.rank.weight,
            ),
        ):
            if not request.is_waiting or request.tenant in in_vain:
                continue
            if tenures is None:
                tenures = [
                    tenure for tenure in self.inventory.tenures() if tenure.id not in self._draining
                ]
            need = self._need(request, promised)
            chosen = (
                victims(tenures, need, self._balance(request, promised))
                if need.lacking_bytes > 0
                else []
            )
            if chosen or need.lacking_bytes <= 0:
                promised[request.tenant] += 0 if request.is_first else request.memory_bytes
                request.is_first = True
            else:
                in_vain.add(request.tenant)
            self._release_instances(chosen, request.tenant)
            tenures = [tenure for tenure in tenures if tenure.id not in self._draining]

    def _release_instances(self, chosen: list[PreemptionCandidate], tenant: str) -> None:
        for victim in chosen:
            log.info(
                "instance released for memory instance=%s of=%s for=%s",
                victim.id,
                victim.tenant,
                tenant,
            )
            self._draining[victim.id] = victim.idle_s is not None
            self.inventory.give_up(victim.id)

    def _need(self, request: StartRequest, promised: Counter[str]) -> ResourceShortfall:
        leaving_soon = sum(
            self._held.get(name, ("", 0))[1] for name, is_idle in self._draining.items() if is_idle
        )
        return ResourceShortfall(
            tenant=request.tenant,
            asked_bytes=request.memory_bytes,
            lacking_bytes=self._shortfall(request, promised) - leaving_soon,
            waited_s=self._clock() - request.since,
            may_take_busy=all(self._draining.values()),
        )

    def _balance(self, request: StartRequest, promised: Counter[str]) -> TenantUsage:
        """Usage after all draining instances have ended and all promised memory is used."""
        use = Counter(self._use)
        use.update(promised)
        use[request.tenant] -= request.memory_bytes if request.is_first else 0
        for name in self._draining:
            tenant, held = self._held.get(name, ("", 0))
            use[tenant] -= held
        weights = {tenant: self._terms.plan_of(tenant).weight for tenant in {*use, request.tenant}}
        return TenantUsage(
            use=use, weights=weights, floors=self._terms.reserved(), total=self._total_bytes
        )

    def retry(self) -> bool:
        """Check again because time has passed, and let the first start in the queue ask the node.
        Returns whether starts wait."""
        self.dispatch()
        first = self._line.pop(lambda request: request.is_waiting and not request.is_first)
        if first is not None:
            self._admit(first)  # the node decides whether there is memory
        return bool(self._line)

    def close(self) -> None:
        """Stop the checks."""
        self._ticks.close()
        self._soon.close()


def _no_room(request: StartRequest) -> errors.Unavailable:
    """The error for a start that waits behind others. It reveals nothing about them."""
    wanted = (
        f"{request.memory_bytes >> 20} MiB requested, and other starts already wait for memory of "
        f"this node"
    )
    return errors.Unavailable(
        f"no room for {request.target.app}/{request.target.function}: {wanted}",
        retry_after_s=5,
        resource="memory",
        asked=request.memory_bytes,
    )
