"""Frozen workers: a restored process tree that cannot be forked waits, stopped, to become the next
instance.

Until then it is a Template: it counts in their memory budget, and is evicted like them. It is
stopped (SIGSTOP, signal(7)) before a start can find it, and continued by the start that takes it,
which then does what follows any restore: new random state, `enter(snap=False)`, the check of its
example. While it is stopped it uses no CPU time, and is not billed. A tree that has
connected to another one since its restore is not kept: that side would wait for it. Nor is one that
runs all the same: user code can have SIGCONT sent to itself, by a timer (timer_create(2)), or by a
process that was stopped last. So the CPU time of each is read every WATCH_S.
"""

from __future__ import annotations

import asyncio

from snapshotter.linux import proc
from snapshotter.slots.occupied_slot import OccupiedSlot
from snapshotter.starts import tcp_connections

WATCH_S = 2.0
"""How long one that does not stay stopped may run."""
_STOPPED_NS = 50_000_000
"""CPU time of a tree that is being stopped, and then of none that stays so."""


def can_freeze(occupied: OccupiedSlot) -> bool:
    """Whether it is a whole tree from a snapshot. One with GPUs keeps them from others, and one
    that was booted may still be dumped."""
    return occupied.whole and not occupied.launch.gpu


async def freeze(occupied: OccupiedSlot) -> bool:
    """Stop all processes of a slot that no start knows of yet. False: it has a connection to
    somebody else; it stays stopped, and must be cleared."""
    return await asyncio.to_thread(_stop, occupied)


def thaw(occupied: OccupiedSlot) -> None:
    """Continue all of them; no effect if they run."""
    proc.continue_tree(occupied.slot.worker_pid, occupied.group.members)


def has_run(occupied: OccupiedSlot) -> bool:
    """Whether it has used CPU time since it was registered as a Template, though it is stopped."""
    used_ns = occupied.group.cpu_ns()
    if used_ns is None or occupied.charged_ns is None:
        return False
    return used_ns - occupied.charged_ns > _STOPPED_NS


def pss_bytes(occupied: OccupiedSlot) -> int:
    """Proportional set size of its processes. Blocks, as `proc.pss_bytes`."""
    pids = _pids(occupied) if occupied.whole else [occupied.slot.worker_pid]
    return sum(map(proc.pss_bytes, pids))


def _stop(occupied: OccupiedSlot) -> bool:
    proc.stop_tree(occupied.slot.worker_pid, occupied.group.members)
    return not tcp_connections.has_outside(_pids(occupied))


def _pids(occupied: OccupiedSlot) -> list[int]:
    return list(
        dict.fromkeys((*proc.process_tree(occupied.slot.worker_pid), *occupied.group.members()))
    )
