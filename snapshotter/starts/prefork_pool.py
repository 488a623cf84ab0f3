"""Parked forks: after a start from a Template the next fork is made ahead of need and waits for its
assignment.

A start that finds one assigns it (phase `assign`) instead of forking (phase `fork`). The group of a
parked fork is created and entered when it is parked, and becomes the instance's. The platform bears
the cost of parked forks as of their Template: they count in its `pss_bytes` and never cause an
eviction. They end with the Template, after `parked_idle_s` without a start, and when the agent is
restarted (the new agent does not know them, ends them, and parks again after the next start).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass

from pilotlight.core.background_tasks import BackgroundTasks
from snapshotter.linux import proc
from snapshotter.linux.cgroups import Cgroups
from snapshotter.slots.occupied_slot import OccupiedSlot, ParkedSpot
from snapshotter.slots.replies import SlotConnectionLost
from snapshotter.slots.slot import Slot
from snapshotter.starts.templates import Template, Templates

_log = logging.getLogger(__name__)
BEHIND_S = 0.1
"""Delay of the next fork after a start, so that the instance's first call has the processor to
itself."""


@dataclass(kw_only=True, eq=False)
class PreforkPool:
    """Keeps forks parked behind Templates. Owner: the event loop; no await between a check and its
    action.

    Attributes:
        per_template: number of parked forks; 0 disables them.
        idle_s: how long they are kept after the last start.
        budget_bytes: limit of Templates and parked forks together; nothing is parked, or stays
            parked, beyond it.
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

    def acquire(self, occupied: OccupiedSlot) -> ParkedSpot | None:
        """Remove and return a fork that waits for its assignment, with its group; None if there is
        none."""
        for spot in occupied.spots:
            if spot.name in occupied.slot.parked:
                occupied.spots.remove(spot)
                occupied.slot.parked.pop(spot.name)
                return spot
        return None

    def on_fork(self, occupied: OccupiedSlot) -> None:
        """An instance was forked here: expect another start."""
        if self.per_template:
            self._after(occupied, BEHIND_S, fill=True)

    def _on_whole(self, occupied: OccupiedSlot) -> None:
        if self.templates.of_slot(occupied.slot.id) is not None:
            self._fill(occupied)

    def on_parked(self, slot: Slot) -> None:
        """A fork in `slot` waits for its assignment."""
        template = self.templates.of_slot(slot.id)
        if template is not None:
            for spot in template.occupied.spots:
                spot.group.weigh(1)
            self.background_tasks.run(self._measure(template), f"measure parked {slot.id}")

    def on_exit(self, slot: Slot, name: str) -> None:
        """A parked fork exited unexpectedly. It is replaced only after the next start, because it
        may exit repeatedly."""
        template = self.templates.of_slot(slot.id)
        if template is not None:
            self._remove(template.occupied, [s for s in template.occupied.spots if s.name == name])

    def clear(self, occupied: OccupiedSlot) -> None:
        """End all parked forks of this slot."""
        if occupied.timer is not None:
            occupied.timer.cancel()
            occupied.timer = None
        if occupied.spots:
            occupied.slot.unpark()
            self._remove(occupied, list(occupied.spots))
        occupied.parked_bytes = 0

    def _after(self, occupied: OccupiedSlot, delay_s: float, *, fill: bool) -> None:
        if occupied.timer is not None:
            occupied.timer.cancel()
        act = self._fill if fill else self.clear
        occupied.timer = asyncio.get_running_loop().call_later(delay_s, act, occupied)

    def _fill(self, occupied: OccupiedSlot) -> None:
        if occupied.pages is not None and occupied.has_missing_pages:
            # a fork of it would have a copy of its own of them
            occupied.pages.exited.add_done_callback(lambda _: self._on_whole(occupied))
            return
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
        spot.group.weigh(0)  # background priority until it is parked
        occupied.spots.append(spot)
        occupied.slot.park(name, spot.group.entry_files())

    def _remove(self, occupied: OccupiedSlot, spots: list[ParkedSpot]) -> None:
        for spot in spots:
            occupied.spots.remove(spot)
            occupied.slot.parked.pop(spot.name, None)
            self.background_tasks.run(spot.group.remove(), f"remove group {spot.name}")

    async def _measure(self, template: Template) -> None:
        """Measure the Template as well: memory that was private to it may now be shared with parked
        forks."""
        occupied = template.occupied
        template.pss_bytes, *parked = [
            await asyncio.to_thread(proc.pss_bytes, pid)
            for pid in (occupied.slot.worker_pid, *occupied.slot.parked.values())
        ]
        occupied.parked_bytes = sum(parked) if occupied.spots else 0
        if occupied.spots and self.templates.pss_bytes() > self.budget_bytes:
            _log.info("park.over_budget slot=%s bytes=%d", occupied.slot.id, occupied.parked_bytes)
            self.clear(occupied)
