"""Parked forks ahead of need: after a start from a Template the next one is forked already and only waits for its name.

A start that finds one assigns it (phase `assign`) instead of forking (phase `fork`). The group of a parked fork is made, and entered, when
it is parked; it becomes the instance's. Parked forks are the platform's cost like their Template: they count in its `pss_bytes`, are never
a reason to evict anybody, and go with it, after `parked_idle_s` without a start, and when the agent is restarted (a new one does not know
them: it clears them away and parks again after the next start).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass

from snapshotter import processes
from snapshotter.cgroups import Cgroups
from snapshotter.errands import Errands
from snapshotter.housing import Housing, Spot
from snapshotter.slots import Slot, SlotLost
from snapshotter.templates import Template, Templates

_log = logging.getLogger(__name__)
BEHIND_S = 0.1
"""After a start its first call has the processor to itself for a moment; the next fork comes behind it."""


@dataclass(kw_only=True, eq=False)
class Parking:
    """Owner: the event loop; nothing here awaits between a look and an act.

    Attributes:
        per_template: how many are kept parked; 0 switches it off.
        idle_s: how long after the last start.
        budget_bytes: for Templates and parked forks together; nothing is parked, or stays so, beyond it.
    """

    cgroups: Cgroups
    templates: Templates
    errands: Errands
    per_template: int
    idle_s: float
    budget_bytes: int

    def __repr__(self) -> str:
        return f"<Parking {sum(len(t.housing.spots) for t in self.templates)} parked, {self.per_template} per Template>"

    def take(self, housing: Housing) -> Spot | None:
        """A fork that waits for its assignment, with its group; None when there is none."""
        for spot in housing.spots:
            if spot.name in housing.slot.parked:
                housing.spots.remove(spot)
                housing.slot.parked.pop(spot.name)
                return spot
        return None

    def used(self, housing: Housing) -> None:
        """An instance was just forked here: another start is likely."""
        if self.per_template:
            self._after(housing, BEHIND_S, fill=True)

    def ready(self, slot: Slot) -> None:
        """One more waits in `slot`."""
        template = self.templates.of_slot(slot.id)
        if template is not None:
            for spot in template.housing.spots:
                spot.group.weigh(1)
            self.errands.run(self._measure(template), f"measure parked {slot.id}")

    def gone(self, slot: Slot, name: str) -> None:
        """A parked fork ended unasked. The next start parks another one, not we: it may end again and again."""
        template = self.templates.of_slot(slot.id)
        if template is not None:
            self._forget(template.housing, [s for s in template.housing.spots if s.name == name])

    def clear(self, housing: Housing) -> None:
        """End all that are parked here."""
        if housing.timer is not None:
            housing.timer.cancel()
            housing.timer = None
        if housing.spots:
            housing.slot.unpark()
            self._forget(housing, list(housing.spots))
        housing.parked_bytes = 0

    def _after(self, housing: Housing, delay_s: float, *, fill: bool) -> None:
        if housing.timer is not None:
            housing.timer.cancel()
        act = self._fill if fill else self.clear
        housing.timer = asyncio.get_running_loop().call_later(delay_s, act, housing)

    def _fill(self, housing: Housing) -> None:
        self._after(housing, self.idle_s, fill=False)
        if self.templates.of_slot(housing.slot.id) is None or self.templates.pss_bytes() > self.budget_bytes:
            return
        try:
            while len(housing.spots) < self.per_template:
                self._park(housing)
        except (OSError, SlotLost) as e:
            _log.warning("park.failed slot=%s error=%s", housing.slot.id, e)

    def _park(self, housing: Housing) -> None:
        name, launch = f"p-{secrets.token_hex(8)}", housing.launch
        spot = Spot(name=name, group=self.cgroups.make(name, memory_bytes=launch.memory_bytes, cpu=launch.cpu))
        spot.group.weigh(0)  # until it waits: nobody waits for it
        housing.spots.append(spot)
        housing.slot.park(name, spot.group.ways_in())

    def _forget(self, housing: Housing, spots: list[Spot]) -> None:
        for spot in spots:
            housing.spots.remove(spot)
            housing.slot.parked.pop(spot.name, None)
            self.errands.run(spot.group.remove(), f"remove group {spot.name}")

    async def _measure(self, template: Template) -> None:
        """The Template, too: it shares with what is parked what it had for itself."""
        housing = template.housing
        template.pss_bytes, *parked = [
            await asyncio.to_thread(processes.pss_bytes, pid) for pid in (housing.slot.worker_pid, *housing.slot.parked.values())
        ]
        housing.parked_bytes = sum(parked) if housing.spots else 0
        if housing.spots and self.templates.pss_bytes() > self.budget_bytes:
            _log.info("park.over_budget slot=%s bytes=%d", housing.slot.id, housing.parked_bytes)
            self.clear(housing)
