"""Admission of starts: first the quotas of the tenant, then memory on the node. One instance serves
all throttlers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from activator.fairness.instance_quota import InstanceInventory, InstanceQuota
from activator.fairness.node_capacity import NodeCapacity
from activator.fairness.queue_priority import QueuePriority
from activator.fairness.share_policy import SharePolicy, UnlimitedShares
from activator.fairness.start_request import StartRequest
from activator.routing.route_table import CallTarget
from pilotlight.spec.identifiers import Priority

INSTANCES, GPUS = "tenant", "gpus"
"""Prefixes of allowance keys that belong to a tenant (`<kind>:<tenant>`) rather than to a
revision."""

IDLE_CHECK_S = 0.01
"""How long an instance must be idle before waiting starts are checked: with short calls there would
be many checks otherwise."""


class StartAdmission:
    """Admits starts. Owner: the event loop.

    Attributes:
        waiting: the starts that wait for memory, and for a quota; each is true while some do.
    """

    def __init__(
        self, terms: SharePolicy | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.terms = terms or UnlimitedShares()
        self._is_counted = terms is not None
        self._clock = clock
        self.instance_quota = InstanceQuota(self.terms, clock=clock)
        self.capacity = NodeCapacity(self.terms, clock=clock)
        self.waiting: tuple[Collection[object], ...] = (
            self.capacity.places,
            self.instance_quota.lines,
        )

    def __repr__(self) -> str:
        return f"<StartAdmission {self.instance_quota!r} {self.capacity!r}>"

    def serve(self, inventory: InstanceInventory) -> None:
        """Set the instances that may be released for starts."""
        self.instance_quota.inventory = self.capacity.inventory = inventory

    def new_request(
        self,
        instance_id: str,
        target: CallTarget,
        *,
        priority: Priority,
        is_needed: Callable[[], bool],
        on_cancel: Callable[[], None],
    ) -> StartRequest:
        """Create the request of one start."""
        rank = QueuePriority(
            priority=priority, tenant=target.tenant, weight=self.terms.plan_of(target.tenant).weight
        )
        return StartRequest(
            instance_id,
            target,
            rank=rank,
            is_needed=is_needed,
            on_cancel=on_cancel,
            since=self._clock(),
        )

    def pools(self, target: CallTarget) -> list[tuple[str, int, int | None]]:
        """What all activators count together in addition to the revision: key, amount of one start,
        and limit."""
        if not self._is_counted:
            return []
        plan = self.terms.plan_of(target.tenant)
        gpus = target.footprint.gpu_count if target.footprint.gpu else 0
        pools: list[tuple[str, int, int | None]] = [
            (f"{INSTANCES}:{target.tenant}", 1, plan.instances)
        ]
        return [*pools, (f"{GPUS}:{target.tenant}", gpus, plan.gpus)] if gpus else pools

    def adopt(self, instance_id: str, target: CallTarget) -> None:
        """Count an instance that existed before (adopted)."""
        self.instance_quota.add(instance_id, target)
        self.capacity.adopt(instance_id, target)

    def release(self, instance_id: str) -> None:
        """Stop counting an instance that has ended or failed to start. Idempotent."""
        self.instance_quota.remove(instance_id)
        self.capacity.release(instance_id)

    def on_instance_idle(self) -> None:
        """Check the waiting starts soon, because an instance has become idle and may be released,
        unless a call comes for it."""
        self.capacity.schedule_dispatch(IDLE_CHECK_S)
        self.instance_quota.schedule_dispatch(IDLE_CHECK_S)

    def close(self) -> None:
        """Stop the checks."""
        self.instance_quota.close()
        self.capacity.close()
