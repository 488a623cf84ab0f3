"""What every start passes on its way to the node: the quotas of its tenant, then room on the node.
One for all throttlers."""

from __future__ import annotations

import time
from collections.abc import Callable

from activator.fairness.instance_quota import InstanceInventory, InstanceQuota
from activator.fairness.node_capacity import NodeCapacity
from activator.fairness.queue_priority import QueuePriority
from activator.fairness.share_policy import SharePolicy, UnlimitedShares
from activator.fairness.start_request import StartRequest
from activator.routing.route_table import CallTarget
from pilotlight.types import Priority

INSTANCES, GPUS = "tenant", "gpus"
"""What keys of allowances begin with that are a tenant's (`<kind>:<tenant>`) and not a
revision's."""

IDLE_LOOK_S = 0.01
"""How long an instance has been idle when starts that wait are told: looks are many otherwise,
where calls are short."""


class StartAdmission:
    """See the module. Owner: the event loop."""

    def __init__(
        self, terms: SharePolicy | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.terms = terms or UnlimitedShares()
        self._is_counted = terms is not None
        self._clock = clock
        self.headcount = InstanceQuota(self.terms, clock=clock)
        self.capacity = NodeCapacity(self.terms, clock=clock)

    def __repr__(self) -> str:
        return f"<Gate {self.headcount!r} {self.capacity!r}>"

    def serve(self, estate: InstanceInventory) -> None:
        """Make room among these instances."""
        self.headcount.estate = self.capacity.estate = estate

    def ask(
        self,
        instance_id: str,
        target: CallTarget,
        *,
        priority: Priority,
        is_needed: Callable[[], bool],
        on_given_up: Callable[[], None],
    ) -> StartRequest:
        """One start that wants to go through."""
        rank = QueuePriority(
            priority=priority, tenant=target.tenant, weight=self.terms.plan_of(target.tenant).weight
        )
        return StartRequest(
            instance_id,
            target,
            rank=rank,
            is_needed=is_needed,
            on_given_up=on_given_up,
            since=self._clock(),
        )

    def pools(self, target: CallTarget) -> list[tuple[str, int, int | None]]:
        """What all activators count together, besides the revision: key, how many of it one start
        takes, and the bound."""
        if not self._is_counted:
            return []
        plan = self.terms.plan_of(target.tenant)
        gpus = target.footprint.gpu_count if target.footprint.gpu else 0
        pools: list[tuple[str, int, int | None]] = [
            (f"{INSTANCES}:{target.tenant}", 1, plan.instances)
        ]
        return [*pools, (f"{GPUS}:{target.tenant}", gpus, plan.gpus)] if gpus else pools

    def hold(self, instance_id: str, target: CallTarget) -> None:
        """An instance that was there already (adopted)."""
        self.headcount.hold(instance_id, target)
        self.capacity.hold(instance_id, target)

    def left(self, instance_id: str) -> None:
        """An instance is gone, or its start did not make one; more than once is fine."""
        self.headcount.left(instance_id)
        self.capacity.left(instance_id)

    def idle(self) -> None:
        """An instance has nothing to do: a start may want its place, if no call comes for it
        meanwhile."""
        self.capacity.look_soon(IDLE_LOOK_S)
        self.headcount.look_soon(IDLE_LOOK_S)

    @property
    def is_crowded(self) -> bool:
        """Whether starts wait here."""
        return bool(self.capacity.places or self.headcount.lines)

    def close(self) -> None:
        """No more looks."""
        self.headcount.close()
        self.capacity.close()
