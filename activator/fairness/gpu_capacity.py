"""GPUs on the node: instances are released for starts that the node refused for missing GPUs.

A start waits while GPUs of a kind that it accepts are becoming free: of instances that are ending,
or claimed by something that does not accept calls (a start, a snapshot proof). It also waits if
busy instances will be drained for it once it has waited for TURN_S. Otherwise the refusal stands.
`gpu_preemption` selects the instances. Only GPUs of acceptable kinds count: an L4 that becomes free
is of no use to a start that waits for an H100."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from activator.fairness.gpu_preemption import GpuShortfall, gpu_victims
from activator.fairness.instance_quota import InstanceInventory
from activator.fairness.preemption import TURN_S, PreemptionCandidate, TenantUsage
from activator.fairness.share_policy import SharePolicy
from activator.fairness.start_request import StartRequest
from activator.routing.route_table import CallTarget
from activator.routing.tenants import priority_of
from pilotlight.spec.identifiers import Isolation
from snapshotter.gpus.grants import gpus_of
from snapshotter.gpus.kinds import ANY

log = logging.getLogger(__name__)


class GpuCapacity:
    """Releases instances for starts that lack GPUs. Owner: the event loop; nothing here awaits."""

    def __init__(
        self,
        terms: SharePolicy,
        inventory: Callable[[], InstanceInventory],
        *,
        clock: Callable[[], float],
    ) -> None:
        self._terms = terms
        self._inventory = inventory
        self._clock = clock
        self._held: dict[str, CallTarget] = {}
        self._draining: dict[str, PreemptionCandidate] = {}

    def __repr__(self) -> str:
        return f"<GpuCapacity {len(self._held)} instances, {len(self._draining)} draining>"

    def add(self, instance_id: str, target: CallTarget) -> None:
        """Count an instance with GPUs, from its start on."""
        self._held[instance_id] = target

    def remove(self, instance_id: str) -> None:
        """Stop counting an instance."""
        self._held.pop(instance_id, None)
        self._draining.pop(instance_id, None)

    def make_room(self, request: StartRequest, detail: Mapping[str, Any]) -> bool:
        """Release instances for a start that the node refused with this detail, where that is fair.
        Returns whether waiting may help."""
        kinds = list(detail.get("kinds", {}))
        draining = [one for one in self._draining.values() if one.gpus_of(kinds)]
        if any(one.idle_s is not None for one in draining):
            return True  # one round at a time
        tenures = self._tenures()
        waited_s = self._clock() - request.since
        chosen = self._select(
            request, detail, tenures, waited_s=waited_s, may_take_busy=not draining
        )
        for victim in chosen:
            log.info(
                "instance released for its GPU instance=%s of=%s for=%s",
                victim.id,
                victim.tenant,
                request.tenant,
            )
            self._draining[victim.id] = victim
            self._inventory().give_up(victim.id)
        claimed = sum(one.gpus_of(kinds) for one in tenures)
        return (
            bool(chosen or draining)
            or int(detail.get("claimed", 0)) > claimed
            or bool(self._select(request, detail, tenures, waited_s=TURN_S, may_take_busy=True))
        )

    def _tenures(self) -> list[PreemptionCandidate]:
        """The instances that are not draining, their priorities limited by their tenants' plans."""
        return [
            replace(one, priority=priority_of(one.priority, None, self._terms.plan_of(one.tenant)))
            for one in self._inventory().tenures()
            if one.id not in self._draining
        ]

    def _select(
        self,
        request: StartRequest,
        detail: Mapping[str, Any],
        tenures: Sequence[PreemptionCandidate],
        *,
        waited_s: float,
        may_take_busy: bool,
    ) -> list[PreemptionCandidate]:
        """Instances to release: for the first kind of which enough becomes free, without busy ones
        if possible, otherwise idle ones for the first kind of which any does."""
        kinds = detail.get("kinds", {})
        balance = self._balance(request.tenant, list(kinds), int(detail.get("total", 0)), tenures)
        partly: list[PreemptionCandidate] = []
        for takes_busy in (False, True)[: 1 + may_take_busy]:
            for kind, figures in kinds.items():
                asked = int(detail.get("asked", request.gpus))
                need = GpuShortfall(
                    tenant=request.tenant,
                    kind=kind,
                    asked=asked,
                    lacking=asked - int(figures["free"]),
                    priority=request.rank.priority,
                    waited_s=waited_s,
                    may_take_busy=takes_busy,
                )
                chosen = gpu_victims(tenures, need, balance)
                if chosen and sum(one.gpus_of([kind]) for one in chosen) >= need.lacking:
                    return chosen
                partly = partly or chosen
        return partly

    def _balance(
        self,
        tenant: str,
        kinds: list[str],
        total: int,
        tenures: Sequence[PreemptionCandidate],
    ) -> TenantUsage:
        """GPUs of these kinds by tenant. Of instances that are starting it is not known which ones
        they get: they count if they accept one of the kinds. Those that are draining do not count.
        A tenant with a reservation keeps what it has."""
        use: Counter[str] = Counter()
        for one in tenures:
            use[one.tenant] += one.gpus_of(kinds)
        known = {one.id for one in tenures} | self._draining.keys()
        for instance_id, target in self._held.items():
            if instance_id not in known and _overlap(target.launch.gpu, kinds):
                use[target.tenant] += gpus_of(target.launch)
        plans = {name: self._terms.plan_of(name) for name in {*use, tenant}}
        return TenantUsage(
            use=use,
            weights={name: plan.weight for name, plan in plans.items()},
            floors={
                name: use[name]
                for name, plan in plans.items()
                if plan.isolation is not Isolation.SHARED
            },
            total=total,
        )


def _overlap(accepted: Sequence[str], kinds: Sequence[str]) -> bool:
    names, others = ({kind.lower() for kind in of} for of in (accepted, kinds))
    return ANY in names | others or bool(names & others)
