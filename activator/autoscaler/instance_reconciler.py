"""Reconciles the throttlers' instances with those of the fleet: at the start of an activator, by
the fleet's events, and after each lost connection to it."""

from __future__ import annotations

import asyncio
import logging

from activator.autoscaler.autoscaler_loop import AutoscalerLoop
from activator.balancing.fleet import Fleet
from activator.routing.call_target import CallTarget
from activator.routing.route_table import RouteTable
from activator.worker_client import engine_sleep
from pilotlight import errors
from pilotlight.core.backoff import Backoff
from snapshotter import errors as agent_errors
from snapshotter.types import AgentEvent, InstanceInfo, InstanceState, TemplateInfo

log = logging.getLogger(__name__)

FIRST_REWATCH_S, MAX_REWATCH_S = 0.05, 2.0
TAKE_BACK_S = 2.0
"""How long a start waits for an instance that a previous process left, and that is only claimed."""
ORPHAN_GRACE_S = 5.0
"""An instance without a route has no waiting caller; it gets this long for its exit hooks."""


class InstanceReconciler:
    """Adopts, removes and stops instances until the autoscaler knows those that there are. Owner:
    the event loop; `watch` is one task."""

    def __init__(self, *, table: RouteTable, fleet: Fleet, scaler: AutoscalerLoop) -> None:
        self._table = table
        self._fleet = fleet
        self._scaler = scaler

    def __repr__(self) -> str:
        return f"<InstanceReconciler of {self._scaler!r}>"

    async def watch(self) -> None:
        """Follow the agent's events until cancelled; reconcile after a lost connection."""
        backoff = Backoff(first_s=FIRST_REWATCH_S, max_s=MAX_REWATCH_S)
        while True:
            try:
                await self.reconcile()
                async for event in self._fleet.watch():
                    backoff.reset()
                    self._on_event(event)
            except agent_errors.SnapshotterError as e:
                if not backoff.failures:
                    log.warning(
                        "node agent does not answer; running instances continue error=%s", e
                    )
                await backoff.pause()

    def _on_event(self, event: AgentEvent) -> None:
        if event.kind in ("template_ready", "template_gone"):
            if (known := self._scaler.revisions.get(event.subject)) is not None:
                known.throttler.start_times.set_template(is_resident=event.kind == "template_ready")
            return
        if event.kind == "room_wanted":
            if not self._scaler.has_instance(event.subject):  # not our own start
                self._scaler.gate.capacity.make_room_for(event.detail["tenant"], event.detail)
            return
        for scaled in self._scaler.revisions.values():
            throttler = scaled.throttler
            instance = throttler.instances.get(event.subject)
            if event.kind == "instance_gone":
                throttler.instance_exited(event.subject, event.reason, event.detail.get("cpu_ns"))
            elif instance is not None and event.kind == "instance_stopping":
                throttler.drain(instance)

    async def reconcile(self) -> None:
        """Compare state with the node: adopt our instances, remove missing ones, stop those without
        a route."""
        throttlers = self._scaler.throttlers()
        known = {
            instance_id: throttler
            for throttler in throttlers
            for instance_id in throttler.instances
        }
        known |= {
            instance.id: throttler
            for throttler in throttlers
            for instance in throttler.asleep.instances()
        }
        infos = {str(info.id): info for info in await self._fleet.adopt()}
        for instance_id, throttler in known.items():
            if instance_id not in infos:
                throttler.instance_exited(instance_id, "lost")
        for instance_id, info in infos.items():
            if instance_id not in known and not self._scaler.has_instance(instance_id):
                await self._adopt(info)
        if not self._scaler.reconciled.is_set():
            await self._reclaim_instances()
            self._table.resume_cutovers()
        self._scaler.reconciled.set()
        if self._table.version:  # an empty table knows nothing yet
            for template in await self._fleet.templates():
                if (scaled := self._scaler.revisions.get(str(template.revision))) is not None:
                    scaled.throttler.start_times.set_template(is_resident=True)
                if (
                    self._target_of(template) is None
                    and template.revision not in self._scaler.revisions
                ):
                    self._scaler.drop_template(template.revision)

    async def _reclaim_instances(self) -> None:
        """Take instances of the revisions that answered before a cutover, where the cluster has
        some and none is claimed by us: the claims of a lone activator end with its process."""

        async def take(target: CallTarget) -> None:
            try:
                reservation = await self._scaler.throttler_of(target).reserve(TAKE_BACK_S)
            except errors.PilotlightError as e:
                log.warning("instance not taken back target=%r error=%s", target, e)
            else:
                reservation.release_unused()

        async with asyncio.TaskGroup() as tasks:
            for target in self._table.previous_targets():
                active = self._scaler.active(target.key)
                is_ours = active is not None and any(active.live())
                if not is_ours and self._fleet.max_instances_of(target.key):
                    tasks.create_task(take(target), name=f"take back {target.key}")

    async def _adopt(self, info: InstanceInfo) -> None:
        target = self._target_of(info)
        if (
            target is None
            or target.spec.sandbox  # its activator has gone, and its call with it
            or target.missing_price(info.gpus) is not None
            or (info.state is InstanceState.READY and await self._is_partially_asleep(target, info))
        ):
            await self._fleet.stop(info.id, grace_s=ORPHAN_GRACE_S)
        else:
            scaled = self._scaler.scaler_of(target)
            scaled.throttler.add(info)
            scaled.adopted += info.state is InstanceState.READY

    async def _is_partially_asleep(self, target: CallTarget, info: InstanceInfo) -> bool:
        try:
            return await engine_sleep.is_partially_asleep(target.spec, info.socket)
        except agent_errors.SnapshotterError as e:
            log.warning("cannot read whether the engine sleeps instance=%s error=%s", info.id, e)
            return False

    def _target_of(self, info: InstanceInfo | TemplateInfo) -> CallTarget | None:
        """The target of an instance or Template; None when it has no route."""
        labels = info.labels
        name = "/".join(
            labels.get(part, "") for part in ("tenant", "environment", "app", "function")
        )
        return next((t for t in self._table.targets_of(name) if t.key == str(info.revision)), None)
