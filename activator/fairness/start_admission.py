"""Admission of starts: the quotas of the tenant, the allowances that several activators share, and
memory on the node, in this order. One instance serves all throttlers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from activator.coordination.state import InstanceLeases
from activator.fairness.instance_quota import InstanceInventory, InstanceQuota
from activator.fairness.node_capacity import NodeCapacity
from activator.fairness.queue_priority import QueuePriority
from activator.fairness.share_policy import SharePolicy, UnlimitedShares
from activator.fairness.start_request import StartCancelled, StartRequest
from activator.routing.route_table import CallTarget
from pilotlight.core.backoff import Backoff
from pilotlight.spec.identifiers import Priority

INSTANCES, GPUS = "tenant", "gpus"
"""Prefixes of allowance keys that belong to a tenant (`<kind>:<tenant>`) rather than to a
revision."""

FIRST_ALLOWANCE_RETRY_S, MAX_ALLOWANCE_RETRY_S = 0.02, 0.25
"""Seconds between requests for an allowance that the other activators hold, as long as the start is
needed."""
IDLE_CHECK_S = 0.01
"""How long an instance must be idle before waiting starts are checked: with short calls there would
be many checks otherwise."""


class StartAdmission:
    """Admits starts. Owner: the event loop.

    Attributes:
        waiting: the starts that wait for memory, and for a quota; each is true while some do.
    """

    def __init__(
        self,
        terms: SharePolicy | None = None,
        *,
        leases: InstanceLeases | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`leases`: allowances of several activators; None when this activator is the only one."""
        self.terms = terms or UnlimitedShares()
        self._is_counted = terms is not None
        self._clock = clock
        self._leases = leases
        self._allowances: dict[str, list[tuple[str, int]]] = {}
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

    async def admit(self, request: StartRequest) -> None:
        """Return when the start may be requested from the fleet. Raises StartCancelled, and the
        errors of a start that can never be admitted."""
        await self.instance_quota.admit(request)
        await self._wait_allowances(request)
        await self.capacity.wait_turn(request)

    async def _wait_allowances(self, request: StartRequest) -> None:
        """Wait until all activators together may hold one more instance. Calls wait meanwhile, each
        until its own deadline."""
        if self._leases is None:
            return
        backoff = Backoff(first_s=FIRST_ALLOWANCE_RETRY_S, max_s=MAX_ALLOWANCE_RETRY_S)
        while not await self._try_acquire(self._leases, request.id, request.target):
            if not request.is_needed():
                raise StartCancelled
            await backoff.pause()

    async def _try_acquire(
        self, leases: InstanceLeases, instance_id: str, target: CallTarget
    ) -> bool:
        """Acquire the allowances of the revision and of its tenant: all or none."""
        taken = self._allowances.setdefault(instance_id, [])
        for key, amount, limit in (
            (target.key, 1, target.spec.scaling.max_instances),
            *self._pools(target),
        ):
            if limit is None:
                leases.record_held(key, amount)
                taken.append((key, amount))
                continue
            granted = await leases.acquire_instances(key, amount, limit)
            if granted:
                taken.append((key, granted))
            if granted < amount:
                self._release_allowances(instance_id)
                return False
        return True

    def _release_allowances(self, instance_id: str) -> None:
        for key, amount in self._allowances.pop(instance_id, ()):
            if self._leases is not None:
                self._leases.release(key, amount)

    def share(self, count: int) -> int:
        """Return this activator's part of a number that all activators provide together."""
        return count if self._leases is None else self._leases.share(count)

    def _pools(self, target: CallTarget) -> list[tuple[str, int, int | None]]:
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
        if self._leases is not None:
            pools = [(target.key, 1), *((key, amount) for key, amount, _ in self._pools(target))]
            self._allowances[instance_id] = pools
            for key, amount in pools:
                self._leases.record_held(key, amount)

    def release(self, instance_id: str) -> None:
        """Stop counting an instance that has ended or failed to start. Idempotent."""
        self._release_allowances(instance_id)
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
