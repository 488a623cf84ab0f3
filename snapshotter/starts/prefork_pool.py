"""Parked forks ahead of need: after a start from a Template the next one is forked already and only
waits for its name.

A start that finds one assigns it (phase `assign`) instead of forking (phase `fork`). The group of a
parked fork is made, and entered, when it is parked; it becomes the instance's. Parked forks are the
platform's cost like their Template: they count in its `pss_bytes`, are never a reason to evict
anybody, and go with it, after `parked_idle_s` without a start, and when the agent is restarted (a
new one does not know them: it clears them away and parks again after the next start)."""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass

from snapshotter.background_tasks import BackgroundTasks
from snapshotter.linux import proc
from snapshotter.linux.cgroups import Cgroups
from snapshotter.slots.manager import OccupiedSlot, ParkedSpot
from snapshotter.slots.slot import Slot, SlotConnectionLost
from snapshotter.starts.templates import Template, Templates

_log = logging.getLogger(__name__)
BEHIND_S = 0.1
"""After a start its first call has the processor to itself for a moment; the next fork comes behind
it."""


@dataclass(kw_only=True, eq=False)
class PreforkPool:
    """Owner: the event loop; nothing here awaits between a look and an act.

    Attributes:
        per_template: how many are kept parked; 0 switches it off. idle_s: how long after the last
        start. budget_bytes: for Templates and parked forks together; nothing is parked, or stays
        so, beyond it.
    """

    cgroups: Cgroups
    templates: Templates
    background_tasks: BackgroundTasks
    per_template: int
    idle_s: float
    budget_bytes: int

    def __repr__(self) -> str:
        return (
            f"<PreforkPool {sum(len(t.occupied.spots) for t in self.templates)} parked, "
            f"{self.per_template} per Template>"
        )

    def take(self, occupied: OccupiedSlot) -> ParkedSpot | None:
        """A fork that waits for its assignment, with its group; None when there is none."""
        for spot in occupied.spots:
            if spot.name in occupied.slot.parked:
                occupied.spots.remove(spot)
                occupied.slot.parked.pop(spot.name)
                return spot
        return None

    def used(self, occupied: OccupiedSlot) -> None:
        """An instance was just forked here: another start is likely."""
        if self.per_template:
            self._after(occupied, BEHIND_S, fill=True)

    def ready(self, slot: Slot) -> None:
        """One more waits in `slot`."""
        template = self.templates.of_slot(slot.id)
        if template is not None:
            for spot in template.occupied.spots:
                spot.group.weigh(1)
            self.background_tasks.run(self._measure(template), f"measure parked {slot.id}")

    def gone(self, slot: Slot, name: str) -> None:
        """A parked fork ended unasked. The next start parks another one, not we: it may end again
        and again."""
        template = self.templates.of_slot(slot.id)
        if template is not None:
            self._forget(template.occupied, [s for s in template.occupied.spots if s.name == name])

    def clear(self, occupied: OccupiedSlot) -> None:
        """End all that are parked here."""
        if occupied.timer is not None:
            occupied.timer.cancel()
            occupied.timer = None
        if occupied.spots:
            occupied.slot.unpark()
            self._forget(occupied, list(occupied.spots))
        occupied.parked_bytes = 0

    def _after(self, occupied: OccupiedSlot, delay_s: float, *, fill: bool) -> None:
        if occupied.timer is not None:
            occupied.timer.cancel()
        act = self._fill if fill else self.clear
        occupied.timer = asyncio.get_running_loop().call_later(delay_s, act, occupied)

    def _fill(self, occupied: OccupiedSlot) -> None:
        self._after(occupied, self.idle_s, fill=False)
        if (
            self.templates.of_slot(occupied.slot.id) is None
            or self.templates.pss_bytes() > self.budget_bytes
        ):
            return
        try:
            while len(occupied.spots) < self.per_template:
                self._park(occupied)
        except (OSError, SlotConnectionLost) as e:
            _log.warning("park.failed slot=%s error=%s", occupied.slot.id, e)

    def _park(self, occupied: OccupiedSlot) -> None:
        name, launch = f"p-{secrets.token_hex(8)}", occupied.launch
        spot = ParkedSpot(
            name=name,
            group=self.cgroups.make(name, memory_bytes=launch.memory_bytes, cpu=launch.cpu),
        )
        spot.group.weigh(0)  # until it waits: nobody waits for it
        occupied.spots.append(spot)
        occupied.slot.park(name, spot.group.ways_in())

    def _forget(self, occupied: OccupiedSlot, spots: list[ParkedSpot]) -> None:
        for spot in spots:
            occupied.spots.remove(spot)
            occupied.slot.parked.pop(spot.name, None)
            self.background_tasks.run(spot.group.remove(), f"remove group {spot.name}")

    async def _measure(self, template: Template) -> None:
        """The Template, too: it shares with what is parked what it had for itself."""
        occupied = template.occupied
        template.pss_bytes, *parked = [
            await asyncio.to_thread(proc.pss_bytes, pid)
            for pid in (occupied.slot.worker_pid, *occupied.slot.parked.values())
        ]
        occupied.parked_bytes = sum(parked) if occupied.spots else 0
        if occupied.spots and self.templates.pss_bytes() > self.budget_bytes:
            _log.info("park.over_budget slot=%s bytes=%d", occupied.slot.id, occupied.parked_bytes)
            self.clear(occupied)
