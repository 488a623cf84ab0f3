"""Ends: what is done when an instance, a Template or a whole slot is gone, whoever caused it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from snapshotter import exits
from snapshotter.errands import Errands
from snapshotter.errors import NoCapacity
from snapshotter.events import Events
from snapshotter.housing import Housekeeper, Housing
from snapshotter.instances import Instance, Instances
from snapshotter.logs import Logs
from snapshotter.metrics import Metrics
from snapshotter.parking import Parking
from snapshotter.running import Running
from snapshotter.slots import Slot
from snapshotter.templates import Template, Templates
from snapshotter.types import AgentEvent, InstanceId, Share

_log = logging.getLogger(__name__)


class Ends:
    """Told by every slot (`running.Owner`). Owner: the event loop; the callbacks do not await, cleaning up is an errand."""

    def __init__(
        self,
        *,
        housekeeper: Housekeeper,
        instances: Instances,
        templates: Templates,
        parking: Parking,
        logs: Logs,
        events: Events,
        metrics: Metrics,
        errands: Errands,
    ) -> None:
        self._housekeeper = housekeeper
        self._instances = instances
        self._templates = templates
        self._parking = parking
        self._logs = logs
        self._events = events
        self._metrics = metrics
        self._errands = errands

    def instance_stopping(self, instance: Instance) -> None:
        """Tell the watchers that it will take no more calls, so that whoever sends them stops before it does."""
        name = instance.info.id
        message = f"instance {name} stops once it has finished what it is doing"
        self._events.publish(AgentEvent(kind="instance_stopping", subject=name, reason="stopped", message=message))

    def room_wanted(self, instance_id: InstanceId, share: Share | None, refusal: NoCapacity, claimed: Mapping[str, int]) -> None:
        """Tell the watchers of a start that was refused for want of memory: whoever holds idle instances may give some up for it."""
        detail = {"tenant": share.tenant if share is not None else "", **refusal.detail, "claims": dict(claimed)}
        self._events.publish(AgentEvent(kind="room_wanted", subject=instance_id, reason="memory", message=str(refusal), detail=detail))

    def instance_gone(self, slot: Slot, running: Running) -> None:
        """Settle the instance, tell the watchers, clean up. One that never was ready is the business of its start; of an earlier agent's
        start nothing is left but the slot."""
        instance = self._instances.get(running.id)
        if instance is None or instance.running is not running:
            self._look_at(slot)
            return
        word = instance.end()
        self._instances.remove(instance)
        _log.info("instance.gone id=%s reason=%s", running.id, word)
        self._errands.run(self._bury(instance, word), f"clear {running.id}")

    async def _bury(self, instance: Instance, word: str) -> None:
        running, housing = instance.running, instance.housing
        assert running is not None
        assert housing is not None
        if instance.was_ready:
            self._metrics.instance_gone(word)
            status = running.gone.result().status
            detail = {**exits.detail(status), "log_tail": await self._logs.tail(running.id), "cpu_ns": instance.cpu_ns_at_end}
            message = exits.sentence(f"instance {running.id}", word, status, memory_bytes=instance.info.memory_bytes)
            self._events.publish(AgentEvent(kind="instance_gone", subject=running.id, reason=word, message=message, detail=detail))
        await instance.clear()
        self.clear_if_empty(housing)

    def worker_gone(self, slot: Slot, status: int | None) -> None:
        """A Template died by itself, or a dropped one is gone at last. Its instances go on."""
        template = self._templates.of_slot(slot.id)
        if template is not None and self._templates.remove(template):
            oom_kills = template.housing.group.oom_kills()
            self.template_gone(template, exits.reason(status, asked=None, oom_kills=oom_kills), exits.detail(status))
        self._look_at(slot)

    def slot_gone(self, slot: Slot) -> None:
        """The shim died, and everything in the slot with it."""
        if not slot.is_ending:
            _log.warning("slot.gone slot=%s", slot.id)
        self.worker_gone(slot, None)

    def log_dropped(self, count: int) -> None:
        """Somebody prints faster than is kept."""
        self._metrics.log_dropped(count)

    def parked(self, slot: Slot) -> None:
        """A fork waits for its assignment."""
        self._parking.ready(slot)

    def parked_gone(self, slot: Slot, name: str) -> None:
        """One that waited ended."""
        self._parking.gone(slot, name)

    def template_gone(self, template: Template, reason: str, detail: Mapping[str, Any]) -> None:
        """Tell the watchers, and let what is parked go with it."""
        self._parking.clear(template.housing)
        self._metrics.template_gone(reason)
        message = f"the Template of {template.revision} is gone: {reason}"
        self._events.publish(
            AgentEvent(kind="template_gone", subject=template.revision, reason=reason, message=message, detail=dict(detail))
        )

    def drop(self, template: Template, reason: str) -> None:
        """Take a Template out of service and end its worker; its instances go on."""
        if not self._templates.remove(template):
            return
        self.template_gone(template, reason, {})
        if template.housing.slot.running:
            template.housing.slot.kill_worker()
        else:
            self.clear_if_empty(template.housing)

    def clear_if_empty(self, housing: Housing) -> None:
        """End a slot in which nothing lives and nothing is wanted any more."""
        slot = housing.slot
        if housing.is_booting or slot.is_ending or slot.running or self._templates.of_slot(slot.id) is not None:
            return
        slot.is_ending = True
        self._errands.run(self._housekeeper.clear(housing), f"clear {slot.id}")

    def _look_at(self, slot: Slot) -> None:
        housing = self._housekeeper.housings.get(slot.id)
        if housing is not None:
            self.clear_if_empty(housing)
