"""Proofs requested by users, with limits: anyone who may deploy can request any number of them, and
each proof runs a process with the memory of an instance.

At most one proof per snapshot, shared by concurrent requests, and one per tenant; few per node,
scheduled fairly between tenants. A proof claims memory and GPUs as an instance does, and is
abandoned after MOST_S. Its CPU time is reported to the requester for billing; the tenant's next
proof can start after REST times its duration."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from pilotlight.core.background_tasks import cancel_all
from snapshotter.errors import ProofsBusy, SnapshotRefused
from snapshotter.slots import sockets
from snapshotter.slots.boot_limiter import FairSemaphore
from snapshotter.slots.instances import Instance, Instances
from snapshotter.starts.node_capacity import NodeCapacity
from snapshotter.types import (
    GpuGrant,
    InstanceId,
    InstanceInfo,
    InstanceState,
    LaunchSpec,
    StartKind,
    TenantShare,
)

MOST_S: Final = 600.0
"""Timeout of one proof, including queueing: allows several restores of a minute for each kind of
pages. A slower start is no better than COLD."""
REST: Final = 9.0
"""Limits proofs to a tenth of the time: no more than an average instance's CPU usage."""
_AT_ONCE = 2
_FORGET = 1000
_RETRY_S = 5.0


class RequestedValidator(Protocol):
    """Proves snapshots (`checkpoints.Checkpoints`)."""

    def launch_of(self, snapshot_id: str) -> LaunchSpec: ...

    async def prove(
        self, snapshot_id: str, charge: Callable[[int], None], *, gpus: GpuGrant | None
    ) -> object: ...


Report = Callable[[str, int], Awaitable[None]]
"""Receives a proof's id and the CPU time (ns) of its processes, after success or failure."""


async def _ignore(proof: str, cpu_ns: int) -> None:
    """Discard the report."""


@dataclass(eq=False)
class _Validation:
    """One running proof."""

    id: str
    tenant: str
    task: asyncio.Task[None] | None = None
    cpu_ns: int = 0

    def charge(self, cpu_ns: int) -> None:
        """Add CPU time."""
        self.cpu_ns += cpu_ns


class RequestedValidations:
    """Runs requested proofs. Owner: the event loop. `_flights` (snapshot → proof) and `_tenants`
    (tenants with a running proof) change between awaits only."""

    def __init__(
        self,
        prover: RequestedValidator,
        *,
        instances: Instances,
        room: NodeCapacity,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prover = prover
        self._instances = instances
        self._room = room
        self._clock = clock
        self._turns = FairSemaphore(_AT_ONCE)
        self._flights: dict[str, _Validation] = {}
        self._tenants: set[str] = set()
        self._not_before: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<RequestedValidations {len(self._flights)} running>"

    async def prove(self, snapshot_id: str, report: Report = _ignore) -> None:
        """Prove it, or wait for its running proof; cancelling a caller does not cancel the proof.

        report: called with the cost for each waiting caller, with the same id, so that it is
        charged once.

        Raises SnapshotUnknown, ProofsBusy, NoCapacity, Unsupported, and SnapshotRefused on a
        timeout."""
        if snapshot_id not in self._flights:
            launch = self._prover.launch_of(snapshot_id)
            tenant = launch.labels.get("tenant", "")
            self._require_turn(tenant)
            self._tenants.add(tenant)
            self._flights[snapshot_id] = new = _Validation(
                f"proof-{snapshot_id}-{secrets.token_hex(4)}", tenant
            )
            new.task = asyncio.create_task(
                self._prove(snapshot_id, launch, new), name=f"prove {snapshot_id}"
            )
            new.task.add_done_callback(lambda task: self._landed(snapshot_id, tenant, task))
        flight = self._flights[snapshot_id]
        assert flight.task is not None
        try:
            await asyncio.shield(flight.task)
        finally:
            if flight.task.done() and flight.cpu_ns:
                await report(flight.id, flight.cpu_ns)

    async def aclose(self) -> None:
        """Cancel running proofs."""
        await cancel_all(
            [flight.task for flight in self._flights.values() if flight.task is not None]
        )

    def _require_turn(self, tenant: str) -> None:
        wait_s = self._not_before.get(tenant, 0.0) - self._clock()
        if tenant not in self._tenants and wait_s <= 0:
            return
        message = "a proof of this tenant is running, or ended just now: try again later"
        raise ProofsBusy(
            message, {"retry_after_s": _RETRY_S if tenant in self._tenants else wait_s}
        )

    async def _prove(self, snapshot_id: str, launch: LaunchSpec, flight: _Validation) -> None:
        try:
            async with asyncio.timeout(MOST_S):
                await self._turns.acquire(TenantShare(tenant=flight.tenant))
                began = self._clock()
                try:
                    with self._claimed(snapshot_id, launch) as gpus:
                        await self._prover.prove(snapshot_id, flight.charge, gpus=gpus)
                finally:
                    self._turns.release()
                    self._rest(flight.tenant, self._clock() - began)
        except TimeoutError as e:
            message = (
                f"the proof of snapshot {snapshot_id} did not finish within {MOST_S:g} s: the "
                f"snapshot is unchanged"
            )
            raise SnapshotRefused(message, {"reasons": [], "passing": True}) from e

    @contextlib.contextmanager
    def _claimed(self, snapshot_id: str, launch: LaunchSpec) -> Iterator[GpuGrant | None]:
        """Claim memory and GPUs, so that starts cannot. Raises NoCapacity, Unsupported."""
        tenant = launch.labels.get("tenant", "")
        gpus = self._room.check_claim(
            launch, [instance.info for instance in self._instances], tenant=tenant
        )
        info = InstanceInfo(
            id=InstanceId(f"proof-{snapshot_id}"),
            revision=launch.revision,
            state=InstanceState.STARTING,
            socket="",
            start_kind=StartKind.RESTORE,
            phases_ms={},
            lessee=None,
            started_at=time.time(),
            pid=0,
            memory_bytes=launch.memory_bytes,
            cpu=launch.cpu,
            gpus=gpus,
            labels=dict(launch.labels),
        )
        claim = Instance(info=info)
        self._instances.add(claim)
        try:
            yield gpus
        finally:
            self._instances.remove(claim)
            claim.cleared.set()

    def _rest(self, tenant: str, took_s: float) -> None:
        now = self._clock()
        if len(self._not_before) > _FORGET:
            self._not_before = {
                name: until for name, until in self._not_before.items() if until > now
            }
        self._not_before[tenant] = now + REST * took_s

    def _landed(self, snapshot_id: str, tenant: str, task: asyncio.Task[None]) -> None:
        del self._flights[snapshot_id]
        self._tenants.discard(tenant)
        sockets.seen(task)
