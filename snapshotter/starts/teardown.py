"""Handles the exit of instances, Templates and slots, whatever the cause."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pilotlight.core.background_tasks import BackgroundTasks
from snapshotter.errors import NoCapacity
from snapshotter.events import Events
from snapshotter.metrics import Metrics
from snapshotter.slots import exit_reason
from snapshotter.slots.allocator import SlotAllocator
from snapshotter.slots.instance_process import InstanceProcess
from snapshotter.slots.instances import Instance, Instances
from snapshotter.slots.logs import Logs
from snapshotter.slots.occupied_slot import OccupiedSlot
from snapshotter.slots.slot import Slot
from snapshotter.starts.prefork_pool import PreforkPool
from snapshotter.starts.templates import Template, Templates
from snapshotter.types import AgentEvent, InstanceId, TenantShare

_log = logging.getLogger(__name__)


class Teardown:
    """Listener of every slot (`slots.slot.SlotListener`). Owner: the event loop; the
    callbacks do not await, and cleanup runs as background tasks."""

    def __init__(
        self,
        *,
        slot_allocator: SlotAllocator,
        instances: Instances,
        templates: Templates,
        prefork_pool: PreforkPool,
        logs: Logs,
        events: Events,
        metrics: Metrics,
        background_tasks: BackgroundTasks,
    ) -> None:
        self._slot_allocator = slot_allocator
        self._instances = instances
        self._templates = templates
        self._prefork_pool = prefork_pool
        self._logs = logs
        self._events = events
        self._metrics = metrics
        self._background_tasks = background_tasks

    def publish_stopping(self, instance: Instance) -> None:
        """Notify the watchers that the instance accepts no more calls, so that senders stop before
        it does."""
        name = instance.info.id
        message = f"instance {name} stops once its calls have finished"
        self._events.publish(
            AgentEvent(kind="instance_stopping", subject=name, reason="stopped", message=message)
        )

    def publish_shortage(
        self,
        instance_id: InstanceId,
        share: TenantShare | None,
        refusal: NoCapacity,
        claimed: Mapping[str, int],
    ) -> None:
        """Notify the watchers of a start that was refused for lack of memory: activators with idle
        instances may stop some."""
        detail = {
            "tenant": share.tenant if share is not None else "",
            **refusal.detail,
            "claims": dict(claimed),
        }
        self._events.publish(
            AgentEvent(
                kind="room_wanted",
                subject=instance_id,
                reason="memory",
                message=str(refusal),
                detail=detail,
            )
        )

    def on_instance_exit(self, slot: Slot, running: InstanceProcess) -> None:
        """Record the exit, notify the watchers, clean up. The start of an instance that never was
        ready handles its exit; if an earlier agent started it, only the slot is cleared."""
        instance = self._instances.get(running.id)
        if instance is None or instance.running is not running:
            self._clear_slot_if_empty(slot)
            return
        word = instance.record_exit()
        self._instances.remove(instance)
        _log.info("instance.gone id=%s reason=%s", running.id, word)
        self._background_tasks.run(self._clean_up(instance, word), f"clear {running.id}")

    async def _clean_up(self, instance: Instance, word: str) -> None:
        running, occupied = instance.running, instance.occupied
        assert running is not None
        assert occupied is not None
        if instance.was_ready:
            self._metrics.record_instance_exit(word)
            status = running.exited.result().status
            detail = {
                **exit_reason.detail(status),
                "log_tail": await self._logs.tail(running.id),
                "cpu_ns": instance.cpu_ns_at_end,
            }
            message = exit_reason.sentence(
                f"instance {running.id}", word, status, memory_bytes=instance.info.memory_bytes
            )
            self._events.publish(
                AgentEvent(
                    kind="instance_gone",
                    subject=running.id,
                    reason=word,
                    message=message,
                    detail=detail,
                )
            )
        await instance.clear()
        self.clear_if_empty(occupied)

    def on_worker_exit(self, slot: Slot, status: int | None) -> None:
        """A Template exited, unexpectedly or after a drop. Its instances continue."""
        template = self._templates.of_slot(slot.id)
        if template is not None and self._templates.remove(template):
            oom_kills = template.occupied.group.oom_kills()
            self.on_template_exit(
                template,
                exit_reason.reason(status, requested=None, oom_kills=oom_kills),
                exit_reason.detail(status),
            )
        self._clear_slot_if_empty(slot)

    def on_slot_lost(self, slot: Slot) -> None:
        """The shim exited, and everything in the slot with it."""
        if not slot.is_ending:
            _log.warning("slot.gone slot=%s", slot.id)
        self.on_worker_exit(slot, None)

    def log_dropped(self, count: int) -> None:
        """Count output that was discarded because a process prints too fast."""
        self._metrics.log_dropped(count)

    def on_parked(self, slot: Slot) -> None:
        """A fork waits for its assignment."""
        self._prefork_pool.on_parked(slot)

    def on_parked_exit(self, slot: Slot, name: str) -> None:
        """A parked fork exited."""
        self._prefork_pool.on_exit(slot, name)

    def on_template_exit(self, template: Template, reason: str, detail: Mapping[str, Any]) -> None:
        """Notify the watchers, and end the Template's parked forks."""
        self._prefork_pool.clear(template.occupied)
        self._metrics.record_template_exit(reason)
        message = f"the Template of {template.revision} exited: {reason}"
        self._events.publish(
            AgentEvent(
                kind="template_gone",
                subject=template.revision,
                reason=reason,
                message=message,
                detail=dict(detail),
            )
        )

    def publish_used(self, template: Template) -> None:
        """Notify the watchers that a start continues a worker that cannot be forked: the next one
        finds none."""
        message = f"the worker of {template.revision} that waited was used by a start"
        self._events.publish(
            AgentEvent(
                kind="template_gone", subject=template.revision, reason="used", message=message
            )
        )

    def drop(self, template: Template, reason: str) -> None:
        """Take a Template out of service and end its worker; its instances continue."""
        if not self._templates.remove(template):
            return
        self.on_template_exit(template, reason, {})
        if template.occupied.slot.running:
            template.occupied.slot.kill_worker()
        else:
            self.clear_if_empty(template.occupied)

    def drop_imported(self, environment: str) -> None:
        """Drop the Templates that were booted in this environment snapshot."""
        for template in list(self._templates):
            if template.occupied.environment == environment:
                self.drop(template, "stopped")

    def clear_if_empty(self, occupied: OccupiedSlot) -> None:
        """End a slot that is empty and no longer needed."""
        slot = occupied.slot
        if slot.is_ending or not self._is_empty(occupied):
            return
        slot.is_ending = True
        self._background_tasks.run(self._slot_allocator.clear(occupied), f"clear {slot.id}")

    def ending_with_gpus(self) -> list[OccupiedSlot]:
        """Slots with GPUs that are cleared, or about to be: nothing runs in them."""
        return [
            occupied
            for occupied in self._slot_allocator.occupied_slots.values()
            if occupied.gpus is not None and (occupied.slot.is_ending or self._is_empty(occupied))
        ]

    def _is_empty(self, occupied: OccupiedSlot) -> bool:
        slot = occupied.slot
        return not (
            occupied.is_booting or slot.running or self._templates.of_slot(slot.id) is not None
        )

    def _clear_slot_if_empty(self, slot: Slot) -> None:
        occupied = self._slot_allocator.occupied_slots.get(slot.id)
        if occupied is not None:
            self.clear_if_empty(occupied)
