"""Instances as the activator sees them: a breaker around each, and plain functions that pick one.

Owner of every Instance is its Throttler; nobody else changes one. An instance is leased to one
activator, so its slots and its bill have one owner."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from activator.billing.instance_meter import InstanceAccount
from activator.worker_client.connection import ConnectionPool
from pilotlight.spec import FunctionSpec
from snapshotter.types import InstanceInfo, StartKind

BUSY_PAUSE_S = 0.02
"""How long an instance that said "busy" is left alone: it is finishing a call whose caller left,
most last milliseconds."""


class Instance:
    """One running worker and its breaker: at most `node_capacity` calls at once.

    Attributes:
        in_flight: calls that hold a slot. idle_since: monotonic time since which nothing is in
        flight; meaningless while something is. is_draining: no new calls; stopped once idle.
        may_rest: it is drained because nothing is left to do: it may sleep instead of ending.
        is_frozen: its processes stand still, or are about to: it takes calls once it is thawed
        (`frozen.Frozen`). is_stuck: a call ran out of its execution clock in it, and perhaps never
        ends. is_gone: its process has ended or is being ended; `gone_reason` says why once the
        agent told. account: its meter and its records. calls: that have ended. held_s: seconds for
        which calls held slots, less the time when those in flight got theirs: add `in_flight * now`
        to read it.
    """

    __slots__ = (
        "_gone",
        "account",
        "blocked_until",
        "calls",
        "capacity",
        "connections",
        "gone_reason",
        "held_s",
        "id",
        "idle_since",
        "in_flight",
        "info",
        "is_draining",
        "is_frozen",
        "is_gone",
        "is_stuck",
        "may_rest",
        "started_at",
    )

    def __init__(
        self, info: InstanceInfo, *, account: InstanceAccount, capacity: int, now: float
    ) -> None:
        self.id = str(info.id)
        self.info = info
        self.capacity = capacity
        self.in_flight = 0
        self.calls = 0
        self.held_s = 0.0
        self.idle_since = now
        self.started_at = now
        self.blocked_until = 0.0
        self.is_draining = False
        self.may_rest = False
        self.is_frozen = False
        self.is_stuck = False
        self.is_gone = False
        self.gone_reason = ""
        self.connections = ConnectionPool(info.socket)
        self.account = account
        self._gone = asyncio.Event()

    def __repr__(self) -> str:
        state = (
            "gone"
            if self.is_gone
            else "draining"
            if self.is_draining
            else "frozen"
            if self.is_frozen
            else "ready"
        )
        return f"<Instance {self.id} {state} {self.in_flight}/{self.capacity}>"

    @property
    def start_kind(self) -> StartKind:
        """How it came up."""
        return self.info.start_kind

    def has_slot(self, now: float) -> bool:
        """Whether one more call may go in."""
        if self.is_draining or self.is_gone or self.is_frozen:
            return False
        return self.in_flight < self.capacity and now >= self.blocked_until

    def block(self, now: float) -> None:
        """Leave it alone for BUSY_PAUSE_S."""
        self.blocked_until = now + BUSY_PAUSE_S

    def settle_idle(self) -> None:
        """Write down what it owes for having been idle up to now."""
        self.account.settle_idle(now_ns=time.monotonic_ns(), at_ns=time.time_ns())

    def settle_end(self, cpu_ns: int | None) -> None:
        """It is gone: write down what it still owes. `cpu_ns`: where its counter of CPU time stood,
        None = nobody knows."""
        self.account.end(cpu_ns=cpu_ns, now_ns=time.monotonic_ns(), at_ns=time.time_ns())

    def settle_cpu(self, cpu_ns: int | None) -> None:
        """It was settled, and is over: write down what it used since. `cpu_ns`: see `settle_end`.
        Idempotent."""
        self.account.end_cpu(cpu_ns=cpu_ns, at_ns=time.time_ns())

    def leave(self) -> None:
        """It is being stopped. Should it turn out to have died of something else, `mark_gone` still
        says so."""
        self.is_gone = True
        self.connections.close()

    def mark_gone(self, reason: str) -> None:
        """Its process ended."""
        self.is_gone = True
        self.gone_reason = self.gone_reason or reason
        self.connections.close()
        self._gone.set()

    async def wait_gone(self, timeout_s: float) -> str:
        """The reason of its end, waiting a little for the agent's word; "" when none came."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._gone.wait()
        except TimeoutError:
            return ""
        return self.gone_reason


def slots_of(spec: FunctionSpec) -> int:
    """Calls at once that one instance takes at most: the sequences that a language model's server
    runs, else what is declared."""
    return spec.engine.max_num_seqs if spec.engine is not None else spec.scaling.max_inputs


def least_loaded(instances: Iterable[Instance], now: float) -> Instance | None:
    """The instance with a free slot and the fewest calls in flight; among equals the last one used,
    so that the others grow idle."""
    best: Instance | None = None
    for instance in instances:
        if instance.has_slot(now):
            if best is None or instance.in_flight < best.in_flight:
                best = instance
                if not best.in_flight and best.capacity == 1:
                    return best
            elif instance.in_flight == best.in_flight and instance.idle_since > best.idle_since:
                best = instance
    return best
