"""Instances on this node, from the memory reservation to the end of their cleanup.

An `Instance` exists from the moment a start is accepted. The shim detects its exit; the agent
determines the reason (`exit_reason`), notifies the watchers, and removes its socket, its cgroup,
and its slot if that is empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from snapshotter.linux import proc
from snapshotter.linux.cgroups import Group
from snapshotter.slots import exit_reason as exits
from snapshotter.slots.instance_process import InstanceProcess
from snapshotter.slots.occupied_slot import OccupiedSlot
from snapshotter.types import InstanceId, InstanceInfo, InstanceState

_TRANSITIONS: Mapping[InstanceState, frozenset[InstanceState]] = {
    InstanceState.STARTING: frozenset(
        {InstanceState.READY, InstanceState.DRAINING, InstanceState.FAILED, InstanceState.STOPPED}
    ),
    InstanceState.READY: frozenset(
        {InstanceState.ASLEEP, InstanceState.DRAINING, InstanceState.FAILED, InstanceState.STOPPED}
    ),
    InstanceState.ASLEEP: frozenset(
        {InstanceState.READY, InstanceState.DRAINING, InstanceState.FAILED, InstanceState.STOPPED}
    ),
    InstanceState.DRAINING: frozenset({InstanceState.FAILED, InstanceState.STOPPED}),
    InstanceState.STOPPED: frozenset(),
    InstanceState.FAILED: frozenset(),
}


@dataclass(kw_only=True, eq=False)
class Instance:
    """One instance. Owner: the event loop.

    Attributes:
        requested_exit: reason of a requested exit (`stopped`, `killed`); None if there is none.
        cpu_ns_at_end: final value of its CPU time counter; None before its exit, and without a
            cgroup.
        cleared: set once the cleanup is complete.
    """

    info: InstanceInfo
    occupied: OccupiedSlot | None = None
    group: Group | None = None
    running: InstanceProcess | None = None
    requested_exit: str | None = None
    was_ready: bool = False
    cpu_ns_at_end: int | None = None
    cleared: asyncio.Event = field(default_factory=asyncio.Event)

    def transition_to(self, state: InstanceState, **changes: Any) -> None:
        """Change to `state`. Raises ValueError for an invalid transition."""
        if state not in _TRANSITIONS[self.info.state]:
            raise ValueError(
                f"instance {self.info.id}: {self.info.state} → {state} is not a valid transition"
            )
        self.info = replace(self.info, state=state, **changes)

    def to_note(self) -> dict[str, Any]:
        """Metadata that the shim stores for a restarted agent; `info` only once the instance was
        handed out."""
        return {
            "info": self.info.to_json() if self.was_ready else None,
            "group": self.group.to_json() if self.group else None,
        }

    def oom_kills(self) -> int:
        """Number of OOM kills in its group."""
        return self.group.oom_kills() if self.group is not None else 0

    def cpu_ns(self) -> int:
        """CPU time of its group, or of its process without a group counter."""
        if self.cpu_ns_at_end is not None:
            return self.cpu_ns_at_end
        used = self.group.cpu_ns() if self.group is not None else None
        return proc.cpu_ns(self.info.pid) if used is None else used

    def used_ns(self) -> int:
        """CPU time that the instance itself has used; 0 if it was never started."""
        return max(0, self.cpu_ns() - self.info.cpu_from_ns) if self.group is not None else 0

    def _runs_server(self) -> bool:
        if self.occupied is None:
            return False
        entry = self.occupied.launch.entry
        return entry.get("kind") == "engine" or entry.get("web_server") is not None

    def record_exit(self) -> str:
        """Record the exit of its process: set state and reason; returns the reason."""
        assert self.running is not None
        how = self.running.exited.result()
        self.cpu_ns_at_end = self.group.cpu_ns() if self.group is not None else None
        word = exits.reason(
            how.status,
            requested=self.requested_exit,
            oom_kills=self.oom_kills(),
            lost=how.lost,
            has_server=self._runs_server(),
        )
        state = (
            InstanceState.STOPPED if word == "stopped" or how.status == 0 else InstanceState.FAILED
        )
        self.transition_to(state, pid=0, exit_reason=word)
        return word

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM, then SIGKILL after `grace_s`, and wait for the cleanup. May be called
        concurrently; the shortest grace wins."""
        running = self.running
        if running is None or self.occupied is None:
            return
        if self.info.state is InstanceState.ASLEEP:
            # a stopped process cannot handle SIGTERM; SIGKILL alone would not need this
            proc.continue_tree(self.info.pid)
        if self.info.state in (InstanceState.STARTING, InstanceState.READY, InstanceState.ASLEEP):
            self.transition_to(InstanceState.DRAINING)
        if not running.exited.done():
            self.requested_exit = self.requested_exit or "stopped"
            if running.pidfd >= 0 and self.was_ready and grace_s > 0:
                proc.send_signal(running.pidfd, signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(grace_s):
                        await asyncio.shield(running.exited)
            if not running.exited.done():
                self.requested_exit = "killed"
                self.occupied.slot.kill(running.id)
        await self.cleared.wait()

    async def clear(self) -> None:
        """Remove socket and cgroup."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.info.socket)
        if self.group is not None:
            await self.group.remove()
        self.cleared.set()


class Instances:
    """All live instances by id. Owner: the event loop; no awaits, so no lock is needed."""

    def __init__(self) -> None:
        self._by_id: dict[InstanceId, Instance] = {}

    def __repr__(self) -> str:
        return f"<Instances {dict(self.by_state())}, {self.claimed_bytes() // 1024**2} MiB claimed>"

    def __iter__(self) -> Iterator[Instance]:
        return iter(list(self._by_id.values()))

    def get(self, instance_id: InstanceId) -> Instance | None:
        """The instance of that id, if it lives."""
        return self._by_id.get(instance_id)

    def add(self, instance: Instance) -> None:
        """Add an instance; its memory counts as claimed."""
        self._by_id[instance.info.id] = instance

    def remove(self, instance: Instance) -> None:
        """Remove an instance; its memory is free again."""
        if self._by_id.get(instance.info.id) is instance:
            del self._by_id[instance.info.id]

    def claimed_bytes(self) -> int:
        """Total memory limit of the live instances."""
        return sum(i.info.memory_bytes for i in self._by_id.values())

    def by_state(self) -> Counter[InstanceState]:
        """Number of instances in each state."""
        return Counter(i.info.state for i in self._by_id.values())

    def matching(self, labels: Mapping[str, str]) -> list[InstanceInfo]:
        """Instances whose labels include `labels`."""
        return [i.info for i in self._by_id.values() if labels.items() <= i.info.labels.items()]
