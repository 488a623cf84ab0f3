"""Room on the node: starts that it has no memory for wait for it in a fair order, and idle
instances are given up for them.

The node agent decides what fits, because it alone knows all claims. Until it refuses one nobody
waits here. From then on starts wait in a FairQueue, whose costs are bytes, and go on as room
becomes free: what the agent said is unclaimed, less what was let through since, plus what has left.
`preemption` says which instances make room. As what others on the node do is not seen here, the
first in line asks the agent again every RETRY_S. A refusal of what waiting cannot change (a node
for other tenants, more than the node has) is no matter of waiting. Where GPUs are lacking, idle
instances that hold some are given up. A start waits while GPUs are on their way: of instances that
end, or claimed by what does not take calls (a start, a proof); where instances that work have them
all, the refusal stands."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from activator.fairness.fair_queue import Entry, FairQueue
from activator.fairness.instance_quota import EmptyInventory, InstanceInventory
from activator.fairness.preemption import (
    PreemptionCandidate,
    ResourceShortfall,
    TenantUsage,
    spare_gpus,
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
"""Between looks while somebody waits: for turns, for callers that left, and for what others on the
node gave back."""


class NodeCapacity:
    """See the module. Owner: the event loop; decisions (`look`) do not await.

    Attributes:
        places: of the starts that wait for room; to read.
        gpu_pause_s: between two asks for a GPU that is on its way.
    """

    def __init__(self, terms: SharePolicy, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._terms = terms
        self._clock = clock
        self.estate: InstanceInventory = EmptyInventory()
        self._line: FairQueue[StartRequest] = FairQueue()
        self.places: Mapping[Entry[StartRequest], None] = self._line.places
        self._held: dict[str, tuple[str, int]] = {}
        self._use: Counter[str] = Counter()
        self._leaving: dict[str, bool] = {}
        self._leaving_gpus: set[str] = set()
        self.gpu_pause_s = RETRY_S
        self._free_bytes = 0
        self._total_bytes = 0
        self._ticks = PeriodicTimer(self.retry, every_s=RETRY_S)
        self._soon = Debouncer(self.look)

    def __repr__(self) -> str:
        return (
            f"<NodeCapacity {sum(self._use.values()) >> 20} MiB of {len(self._use)} tenants, "
            f"{len(self._line)} starts wait>"
        )

    @property
    def waiting(self) -> int:
        """Starts that wait for room."""
        return len(self._line)

    async def enter(self, ask: StartRequest) -> None:
        """Before the node is asked: nobody overtakes those who wait. Raises StartCancelled."""
        if not self._line:
            self._hold(ask.id, ask.target)
            return
        if not ask.is_needed():
            raise StartCancelled
        await self._wait(ask)

    async def wait_for_room(
        self, ask: StartRequest, refusal: NoCapacity, answer: errors.PilotlightError
    ) -> None:
        """The node refused: wait until it may be asked again. `answer`: what callers are told at
        their deadline.

        Raises the refusal where waiting is no use, StartCancelled.
        """
        self._drop(ask.id)
        detail = refusal.detail
        if detail.get("resource") == "gpu" and not ask.is_needed():
            raise StartCancelled  # nobody's instance is given up for it
        if detail.get("resource") == "gpu" and (
            self._give_up_gpus(ask, detail) or self._has_others(detail)
        ):
            ask.obstacle = answer
            # nothing tells when a GPU's memory is free: the node is asked again
            await asyncio.sleep(self.gpu_pause_s)
            ask.obstacle = None
            self._hold(ask.id, ask.target)
            return
        if detail.get("resource") != "memory" or ask.memory_bytes > detail.get("total", 0):
            raise refusal
        self._total_bytes = int(detail["total"])
        self._free_bytes = self._total_bytes - int(detail["claimed"])
        if not ask.is_needed():
            raise StartCancelled
        await self._wait(ask, answer)

    async def _wait(self, ask: StartRequest, answer: errors.PilotlightError | None = None) -> None:
        ask.since = self._clock() if answer is None else min(ask.since, self._clock())
        ask.obstacle = answer or _no_room(ask)
        self._ticks.begin()
        await ask.wait_in(
            self._line,
            ask.rank,
            cost=float(max(1, ask.memory_bytes)),
            look=self.look_soon,
            is_first=answer is not None,
        )

    # -- what is held ------------------------------------------------------------------------------
    def hold(self, instance_id: str, target: CallTarget) -> None:
        """An instance that was there already (adopted)."""
        if instance_id not in self._held:
            self._hold(instance_id, target)

    def left(self, instance_id: str) -> None:
        """It is gone, or never came."""
        freed = self._drop(instance_id)
        self._leaving.pop(instance_id, None)
        self._leaving_gpus.discard(instance_id)
        if freed and self._line:
            self._free_bytes += freed
            self.look_soon()

    def _hold(self, instance_id: str, target: CallTarget) -> None:
        self._held[instance_id] = target.tenant, target.launch.memory_bytes
        self._use[target.tenant] += target.launch.memory_bytes

    def _drop(self, instance_id: str) -> int:
        tenant, held = self._held.pop(instance_id, ("", 0))
        if held:
            self._use[tenant] -= held
            if not self._use[tenant]:
                del self._use[tenant]
        return held

    # -- handing out -------------------------------------------------------------------------------
    def look_soon(self, delay_s: float = 0.0) -> None:
        """Look once for all that happens until then."""
        if self._line:
            self._soon.ask(delay_s)

    def look(self) -> None:
        """Let through whoever fits now, in their order, and make room for the others where that is
        fair."""
        cancel_unneeded(self._line)
        promised = Counter[str]()
        for ask in self._line:
            promised[ask.tenant] += ask.memory_bytes if ask.is_first and ask.is_waiting else 0
        while (
            fitting := self._line.pop(
                lambda ask: not ask.is_waiting or self._lacking(ask, promised) <= 0
            )
        ) is not None:
            promised[fitting.tenant] -= (
                fitting.memory_bytes if fitting.is_first and fitting.is_waiting else 0
            )
            self._let_through(fitting)
        self._make_room(promised)

    def make_room_for(self, tenant: str, detail: Mapping[str, Any]) -> None:
        """Another activator's start of this tenant was refused (event `room_wanted`): give up what
        is idle here, where that is fair.

        One round at a time: it asks again until it gets on.
        """
        if self._leaving:
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
            total_bytes=int(detail["total"]),
        )
        self._give_up(victims(self.estate.tenures(), need, balance), tenant)

    def _let_through(self, ask: StartRequest) -> None:
        if ask.is_waiting:
            self._hold(ask.id, ask.target)
            self._free_bytes -= ask.memory_bytes
            ask.go_on()

    def _lacking(self, ask: StartRequest, promised: Counter[str]) -> int:
        """Bytes that have to become free before it fits: beyond what is promised to others, and
        what is reserved for them."""
        others = promised.total() - (ask.memory_bytes if ask.is_first else 0)
        floors = self._terms.reserved()
        kept = sum(
            max(0, floor - self._use[tenant])
            for tenant, floor in floors.items()
            if tenant != ask.tenant
        )
        return ask.memory_bytes + others + kept - self._free_bytes

    def _make_room(self, promised: Counter[str]) -> None:
        """By priority, and of who holds less for its weight before others, until there is nothing
        to be had for a tenant."""
        tenures: list[PreemptionCandidate] | None = None
        in_vain: set[str] = set()
        for ask in sorted(
            self._line,
            key=lambda ask: (ask.rank.priority.rank, self._use[ask.tenant] / ask.rank.weight),
        ):
            if not ask.is_waiting or ask.tenant in in_vain:
                continue
            if tenures is None:
                tenures = [
                    tenure for tenure in self.estate.tenures() if tenure.id not in self._leaving
                ]
            need = self._need(ask, promised)
            chosen = (
                victims(tenures, need, self._balance(ask, promised))
                if need.lacking_bytes > 0
                else []
            )
            if chosen or need.lacking_bytes <= 0:
                promised[ask.tenant] += 0 if ask.is_first else ask.memory_bytes
                ask.is_first = True
            else:
                in_vain.add(ask.tenant)
            self._give_up(chosen, ask.tenant)
            tenures = [tenure for tenure in tenures if tenure.id not in self._leaving]

    def _give_up(self, chosen: list[PreemptionCandidate], tenant: str) -> None:
        for victim in chosen:
            log.info(
                "instance given up for room instance=%s of=%s for=%s",
                victim.id,
                victim.tenant,
                tenant,
            )
            self._leaving[victim.id] = victim.idle_s is not None
            self.estate.give_up(victim.id)

    def _give_up_gpus(self, ask: StartRequest, detail: Mapping[str, Any]) -> bool:
        """Whether GPUs are on their way: idle instances were asked to go for it, now or before."""
        if self._leaving_gpus:
            return True
        chosen = spare_gpus(
            self.estate.tenures(),
            tenant=ask.tenant,
            lacking=int(detail.get("asked", ask.gpus)) - int(detail.get("free", 0)),
        )
        self._leaving_gpus = {tenure.id for tenure in chosen}
        for victim in chosen:
            log.info(
                "instance given up for its GPU instance=%s of=%s for=%s",
                victim.id,
                victim.tenant,
                ask.tenant,
            )
            self.estate.give_up(victim.id)
        return bool(chosen)

    def _has_others(self, detail: Mapping[str, Any]) -> bool:
        """Whether the node counts more GPUs as claimed than the instances here that take calls
        have."""
        return int(detail.get("claimed", 0)) > sum(tenure.gpus for tenure in self.estate.tenures())

    def _need(self, ask: StartRequest, promised: Counter[str]) -> ResourceShortfall:
        leaving_soon = sum(
            self._held.get(name, ("", 0))[1] for name, is_idle in self._leaving.items() if is_idle
        )
        return ResourceShortfall(
            tenant=ask.tenant,
            asked_bytes=ask.memory_bytes,
            lacking_bytes=self._lacking(ask, promised) - leaving_soon,
            waited_s=self._clock() - ask.since,
            may_take_busy=all(self._leaving.values()),
        )

    def _balance(self, ask: StartRequest, promised: Counter[str]) -> TenantUsage:
        """As it will be when all that leave have left, and all that were promised room have it."""
        use = Counter(self._use)
        use.update(promised)
        use[ask.tenant] -= ask.memory_bytes if ask.is_first else 0
        for name in self._leaving:
            tenant, held = self._held.get(name, ("", 0))
            use[tenant] -= held
        weights = {tenant: self._terms.plan_of(tenant).weight for tenant in {*use, ask.tenant}}
        return TenantUsage(
            use=use, weights=weights, floors=self._terms.reserved(), total_bytes=self._total_bytes
        )

    def retry(self) -> bool:
        """Time has passed: look again, and have the first in line ask the node. Whether anybody
        waits."""
        self.look()
        first = self._line.pop(lambda ask: ask.is_waiting and not ask.is_first)
        if first is not None:
            self._let_through(first)  # the node says whether there is room
        return bool(self._line)

    def close(self) -> None:
        """No more looks."""
        self._ticks.close()
        self._soon.close()


def _no_room(ask: StartRequest) -> errors.Unavailable:
    """What is said of a start that waits behind others: nothing of theirs."""
    wanted = (
        f"{ask.memory_bytes >> 20} MiB wanted, and other starts wait for memory of this node "
        f"already"
    )
    return errors.Unavailable(
        f"no room for {ask.target.app}/{ask.target.function}: {wanted}",
        retry_after_s=5,
        resource="memory",
        asked=ask.memory_bytes,
    )
