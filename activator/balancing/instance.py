"""Instances with their slots, and the reservation of a slot, which a call holds until it has ended.

Each Instance is owned and changed only by its Throttler. An instance is leased to one activator, so
its slots and its bill have one owner."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol

from activator.billing.instance_account import InstanceAccount
from activator.resilience.breaker import ANSWERED, Outcome
from activator.worker_client.connection import ConnectionPool
from pilotlight import errors
from pilotlight.spec.function import FunctionSpec
from snapshotter.types import InstanceInfo, StartKind
from weight_cache.types import Tier

BUSY_PAUSE_S = 0.02
"""How long an instance that answered "busy" gets no calls: it is finishing a call whose caller
disconnected, mostly within milliseconds."""
MAX_DOUBLINGS = 5
"""The pause doubles so often: to 0.64 s."""


class RunningAttempt(Protocol):
    """An attempt that runs on an instance (`calls.attempt.Attempt`)."""

    @property
    def record_id(self) -> str:
        """Id of its usage record."""

    @property
    def calling_tenant(self) -> str:
        """The tenant that calls, where it is not the function's own, else ""."""

    def cut(self, error: errors.PilotlightError) -> None:
        """End it with `error`."""


class Instance:
    """One running worker with its slots: at most `capacity` concurrent calls.

    Attributes:
        in_flight: calls that hold a slot.
        running: attempts that were dispatched to it and have not ended, by call id: those in whose
            name its function may call others (`calls_by_functions`).
        on_gone: called when it takes no more calls; it may be called more than once.
        idle_since: monotonic time since which nothing is in flight; meaningless otherwise.
        busy_answers: answers "busy" in a row.
        is_draining: no new calls; stopped once idle.
        may_suspend: it is drained because it is not needed, and may be suspended instead of
            stopped.
        is_frozen: its processes are frozen or about to be: it takes calls once it is thawed
            (`idle_instances.FrozenInstances`).
        is_stuck: a call exceeded its execution clock in it, and may never end.
        is_gone: its process has ended or is being stopped.
        exit_reason: why it ended, once the agent reported it.
        account: its meter and its records.
        calls: number of ended calls.
        held_s: seconds for which calls held slots, less the start times of those in flight: add
            `in_flight * now` to read it.
    """

    __slots__ = (
        "_gone",
        "account",
        "blocked_until",
        "busy_answers",
        "calls",
        "capacity",
        "connections",
        "exit_reason",
        "held_s",
        "id",
        "idle_since",
        "in_flight",
        "info",
        "is_draining",
        "is_frozen",
        "is_gone",
        "is_stuck",
        "may_suspend",
        "on_gone",
        "running",
        "started_at",
    )

    def __init__(
        self, info: InstanceInfo, *, account: InstanceAccount, capacity: int, now: float
    ) -> None:
        self.id = str(info.id)
        self.info = info
        self.capacity = capacity
        self.in_flight = 0
        self.running: dict[str, RunningAttempt] = {}
        self.on_gone: Callable[[], None] = _do_nothing
        self.calls = 0
        self.held_s = 0.0
        self.idle_since = now
        self.started_at = now
        self.blocked_until = 0.0
        self.busy_answers = 0
        self.is_draining = False
        self.may_suspend = False
        self.is_frozen = False
        self.is_stuck = False
        self.is_gone = False
        self.exit_reason = ""
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
        """The kind of start that created it."""
        return self.info.start_kind

    def has_slot(self, now: float) -> bool:
        """Return whether it can take one more call."""
        if self.is_draining or self.is_gone or self.is_frozen:
            return False
        return self.in_flight < self.capacity and now >= self.blocked_until

    def block(self, now: float) -> None:
        """Give it no calls for a pause, which doubles from BUSY_PAUSE_S on until it takes one: each
        attempt has a record, which costs its tenant nothing."""
        if now < self.blocked_until:
            return
        self.blocked_until = now + BUSY_PAUSE_S * 2 ** min(self.busy_answers, MAX_DOUBLINGS)
        self.busy_answers += 1

    def settle_idle(self) -> None:
        """Record its idle time up to now for billing."""
        self.account.settle_idle(now_ns=time.monotonic_ns(), at_ns=time.time_ns())

    def settle_end(self, cpu_ns: int | None) -> None:
        """Record its remaining usage after it ended. `cpu_ns`: last value of its CPU time counter,
        None = unknown."""
        self.account.end(cpu_ns=cpu_ns, now_ns=time.monotonic_ns(), at_ns=time.time_ns())

    def settle_gpus(self) -> None:
        """Record the time of its GPUs up to now, while it is suspended."""
        self.account.settle_gpus(now_ns=time.monotonic_ns(), at_ns=time.time_ns())

    def suspend_billing(self) -> None:
        """Its idle time was recorded, and it is suspended."""
        self.account.suspend(now_ns=time.monotonic_ns())

    def resume_billing(self) -> None:
        """It is being resumed, as another start."""
        self.account.resume(now_ns=time.monotonic_ns())

    def stop_billing(self) -> None:
        """Its idle time was recorded, and it is being stopped."""
        self.account.stop(now_ns=time.monotonic_ns())

    def settle_stopped(self, cpu_ns: int | None) -> None:
        """Record its CPU time and the time of its GPUs since it was settled, once it has ended or
        resumed. `cpu_ns`: see `settle_end`. Idempotent."""
        self.account.finish(cpu_ns=cpu_ns, now_ns=time.monotonic_ns(), at_ns=time.time_ns())

    def mark_stopping(self) -> None:
        """Mark it as being stopped. `mark_exited` may still record another reason for its end."""
        self.is_gone = True
        self.connections.close()
        self.on_gone()

    def mark_exited(self, reason: str) -> None:
        """Record that its process ended, and why."""
        self.is_gone = True
        self.exit_reason = self.exit_reason or reason
        self.connections.close()
        self.on_gone()
        self._gone.set()

    async def wait_exited(self, timeout_s: float) -> str:
        """Return the reason of its end, waiting up to `timeout_s` for the agent to report it; ""
        when it did not."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._gone.wait()
        except TimeoutError:
            return ""
        return self.exit_reason


def _do_nothing() -> None:
    """Default of `Instance.on_gone`."""


def slots_of(spec: FunctionSpec) -> int:
    """Return the maximum number of concurrent calls of one instance: the sequences that a language
    model's server runs, else the declared number."""
    return spec.engine.max_num_seqs if spec.engine is not None else spec.scaling.max_inputs


WARM: Final = StartKind.WARM
"""Module constant for the hot path, as `breaker.ANSWERED`."""
TENANT_SUSPENDED: Final = "suspended"
"""Exit reason of an instance that was stopped because its tenant is suspended."""
CANCELLED = "cancelled"
"""Outcome of a call whose caller disconnected."""


class SlotOwner(Protocol):
    """Owner of the slot (the Throttler)."""

    def release(self, instance: Instance, ending: Outcome = ANSWERED) -> None:
        """Free the slot; `ending`: outcome of its call for breakers."""

    def drain(self, instance: Instance) -> None:
        """Give this instance no more calls."""


class Reservation:
    """A reserved slot. Its holder must `release` it exactly once.

    Attributes:
        start_kind: WARM, or the kind of the start that this call waited for.
        start_ms: the part of the wait that was that start.
        ending: outcome of its call for breakers.
    """

    __slots__ = ("ending", "instance", "start_kind", "start_ms", "throttler")

    def __init__(
        self, throttler: SlotOwner, instance: Instance, start_kind: StartKind, start_ms: float
    ) -> None:
        self.throttler = throttler
        self.instance = instance
        self.start_kind = start_kind
        self.start_ms = start_ms
        self.ending = ANSWERED

    @property
    def weights(self) -> str:
        """The storage tier of the weights of the start that this call waited for, the farthest of
        several; "" for a WARM call."""
        if self.start_kind is WARM:
            return ""
        tiers = set(self.instance.info.weights.values())
        return next((tier.value for tier in Tier if tier.value in tiers), "")

    def release(self) -> None:
        """Release the slot."""
        self.throttler.release(self.instance, self.ending)

    def release_unused(self) -> None:
        """Release a slot on which no call ran: the outcome does not count, and a breaker's probe is
        still pending."""
        self.throttler.release(self.instance, Outcome.NEITHER)
