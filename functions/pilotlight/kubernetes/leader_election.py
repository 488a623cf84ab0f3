"""Leader election on a Kubernetes Lease.

Clocks are not compared between processes. A candidate records when *it* last saw the Lease change;
a Lease that has not changed for its `leaseDurationSeconds`, by the candidate's own monotonic clock,
is free. A leader steps down by itself as soon as its last successful renewal *began* `renew_s` ago;
since `renew_s` is below the lease duration, it has stepped down before another can take over,
independent of wall clocks. Only monotonic clocks of different speeds could break that: the distance
between `renew_s` and `lease_s` allows for a third.

Writes have the resourceVersion that was read: of two candidates that take a free Lease, one gets a
conflict.

A candidate of which one process at a time exists (`LeaseLock.member`) does not wait for the Lease
of its own earlier process, which has ended: after a crash it leads again as soon as it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol, Self

from pilotlight.core.threads import cancel_and_wait
from pilotlight.kubernetes.errors import ClusterError, Conflict, NotFound
from pilotlight.kubernetes.kinds import LEASE, Kind
from pilotlight.kubernetes.watch_events import Object, version_of

logger = logging.getLogger(__name__)


class LeaseServer(Protocol):
    """The methods of a `Cluster` that an election needs."""

    async def get(
        self, kind: Kind, name: str, namespace: str | None = None, *, timeout_s: float | None = None
    ) -> Object | None:
        """The Lease, or None."""

    async def create(self, manifest: Object, *, timeout_s: float | None = None) -> Object:
        """Create the Lease. Raises AlreadyExists."""

    async def replace(self, manifest: Object, *, timeout_s: float | None = None) -> Object:
        """Replace the Lease. Raises Conflict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """Times of an election, in seconds: `retry_s` < `renew_s` < `lease_s`.

    Attributes:
        lease_s: lease duration: after a leader's crash there is no leader for this long.
        renew_s: renew deadline, after which a leader that cannot renew steps down.
        retry_s: between attempts to acquire or renew the Lease, plus up to a fifth of jitter.
    """

    lease_s: float = 15.0
    renew_s: float = 10.0
    retry_s: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.retry_s < self.renew_s < self.lease_s:
            raise ValueError(
                f"retry_s = {self.retry_s}, renew_s = {self.renew_s}, lease_s = {self.lease_s}: "
                f"each must be greater than the previous one"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLock:
    """The Lease that candidates compete for, and who this candidate is.

    Attributes:
        identity: unique per process: the pod's name and a random part.
        member: what the identities of this candidate's processes begin with, if an earlier one has
            always ended before the next one begins; "" = that is not certain.
        annotations: of the Lease while this candidate holds it.
    """

    name: str
    namespace: str
    identity: str
    member: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """The last seen Lease, and when this version was first seen (monotonic)."""

    lease: Object
    since_s: float

    @property
    def holder(self) -> str:
        return str(self.spec.get("holderIdentity") or "")

    @property
    def spec(self) -> Object:
        return self.lease.get("spec") or {}

    def is_free(self, now_s: float) -> bool:
        promised_s = float(self.spec.get("leaseDurationSeconds") or 0)
        return not self.holder or now_s - self.since_s > promised_s


class LeaderElection:
    """One candidate. Owner: one event loop. A context manager that runs its own task and releases
    the Lease at the end.

    `is_leader` is true only while no other candidate can be leader; check it again before each
    write that only a leader may make."""

    def __init__(
        self,
        cluster: LeaseServer,
        lock: LeaseLock,
        *,
        terms: LeaseTerms | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        chance: Callable[[], float] = random.random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Prepare a candidate; it does not run yet.

        `wall`: wall clock, only for the timestamps in the Lease."""
        self.lock = lock
        self.terms = terms or LeaseTerms()
        self.transitions = 0
        """How often this candidate became leader."""
        self._cluster = cluster
        self._clock, self._wall, self._chance, self._sleep = clock, wall, chance, sleep
        self._seen: _Seen | None = None
        self._earlier: str | None = None
        self._renewed_s: float | None = None
        self._was_leader = False
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = "leader" if self.is_leader else f"behind {self.leader or 'no leader'}"
        return (
            f"<LeaderElection {self.lock.namespace}/{self.lock.name} {self.lock.identity} {state}>"
        )

    @property
    def is_leader(self) -> bool:
        """Whether this candidate is currently the leader."""
        return self._renewed_s is not None and self._clock() - self._renewed_s < self.terms.renew_s

    @property
    def leader(self) -> str | None:
        """The last seen holder of the Lease; None = no holder, or never seen."""
        return (self._seen.holder or None) if self._seen is not None else None

    async def wait_leader(self) -> None:
        """Wait until this candidate is the leader."""
        while not self.is_leader:
            self._changed.clear()
            await self._changed.wait()

    async def wait_follower(self) -> None:
        """Wait until this candidate is not the leader."""
        while self.is_leader:
            self._changed.clear()
            await self._changed.wait()

    async def run(self) -> None:
        """Acquire the Lease, renew it, and acquire it again after a loss, until cancelled."""
        try:
            while True:
                await self.step()
                await self._sleep(self._pause_s())
                self._notify()
        finally:
            self._renewed_s = None
            self._notify()

    async def step(self) -> None:
        """Make one attempt to acquire or renew the Lease. Errors of the cluster are logged: the
        next attempt may succeed."""
        try:
            async with asyncio.timeout(self._attempt_s()):
                await self._attempt()
        except TimeoutError:
            logger.warning(
                "lease not reached name=%s identity=%s", self.lock.name, self.lock.identity
            )
        except ClusterError as error:
            logger.warning(
                "lease not taken name=%s identity=%s error=%s",
                self.lock.name,
                self.lock.identity,
                error,
            )
        self._notify()

    async def release(self) -> None:
        """Step down and release the Lease, so that the next leader need not wait. Call it after the
        work has stopped."""
        self._renewed_s = None
        self._notify()
        if self._seen is None or self._seen.holder != self.lock.identity:
            return
        lease = self._written(self._seen, holder="", lease_s=1)
        self._seen = None
        with contextlib.suppress(ClusterError):  # it expires by itself
            await self._cluster.replace(lease, timeout_s=self.terms.retry_s)

    async def _attempt(self) -> None:
        began_s = self._clock()
        if self._renewed_s is not None and self._seen is not None:
            with contextlib.suppress(Conflict, NotFound):  # changed by others: read it again
                await self._write(self._seen, began_s)
                return
        found = await self._cluster.get(
            LEASE, self.lock.name, self.lock.namespace, timeout_s=self._attempt_s()
        )
        seen = self._observe(found)
        if (
            seen is not None
            and seen.holder not in (self.lock.identity, self._earlier)
            and not seen.is_free(self._clock())
        ):
            self._renewed_s = None
        elif found is None:
            self._renewed_s = None  # deleted: the candidate that recreates it becomes leader
            self._hold(
                await self._cluster.create(
                    self._written(None, holder=self.lock.identity), timeout_s=self._attempt_s()
                ),
                began_s,
            )
        elif seen is not None:
            await self._write(seen, began_s)

    async def _write(self, seen: _Seen, began_s: float) -> None:
        self._hold(
            await self._cluster.replace(
                self._written(seen, holder=self.lock.identity), timeout_s=self._attempt_s()
            ),
            began_s,
        )

    def _observe(self, lease: Object | None) -> _Seen | None:
        """Record since when the Lease has been unchanged. A deleted Lease counts as last seen: its
        holder may not have noticed yet."""
        if lease is not None and (
            self._seen is None or version_of(self._seen.lease) != version_of(lease)
        ):
            is_first = self._seen is None and self._earlier is None
            self._seen = _Seen(lease=lease, since_s=self._clock())
            if is_first and self.lock.member and self._seen.holder.startswith(self.lock.member):
                self._earlier = self._seen.holder  # it ended before this process began
        return self._seen

    def _hold(self, lease: Object, began_s: float) -> None:
        self._seen = _Seen(lease=lease, since_s=self._clock())
        # when the renewal began: the server may have carried it out at any time since
        self._renewed_s = began_s

    def _written(self, seen: _Seen | None, *, holder: str, lease_s: float | None = None) -> Object:
        now = datetime.fromtimestamp(self._wall(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        old = seen.spec if seen is not None else {}
        is_new = holder != old.get("holderIdentity")
        spec = {
            **old,
            "holderIdentity": holder,
            "leaseDurationSeconds": max(1, round(lease_s or self.terms.lease_s)),
            "renewTime": now,
            "acquireTime": now if is_new else old.get("acquireTime", now),
            "leaseTransitions": int(old.get("leaseTransitions") or 0)
            + (1 if is_new and holder and seen is not None else 0),
        }
        meta: dict[str, Any] = {"name": self.lock.name, "namespace": self.lock.namespace}
        if seen is not None:
            meta = {**(seen.lease.get("metadata") or {})}
            meta.pop("managedFields", None)
        if self.lock.annotations and holder:
            meta["annotations"] = {**(meta.get("annotations") or {}), **self.lock.annotations}
        return {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": meta, "spec": spec}

    def _attempt_s(self) -> float:
        """Timeout of one attempt: half of a leader's time, and never beyond its end."""
        most_s = max(self.terms.retry_s, (self.terms.renew_s - self.terms.retry_s) / 2)
        left_s = self._left_s()
        return min(most_s, left_s) if left_s > 0 else most_s

    def _left_s(self) -> float:
        return (
            self._renewed_s + self.terms.renew_s - self._clock()
            if self._renewed_s is not None
            else 0.0
        )

    def _pause_s(self) -> float:
        pause_s = self.terms.retry_s * (1 + self._chance() / 5)
        left_s = self._left_s()
        # wake up at the end of a leadership to report it
        return min(pause_s, left_s) if left_s > 0 else pause_s

    def _notify(self) -> None:
        """Record a change of the leadership, and wake up those that wait for one."""
        is_leader = self.is_leader
        if is_leader == self._was_leader:
            return
        self._was_leader = is_leader
        self._changed.set()
        if is_leader:
            self.transitions += 1
        logger.info(
            "leadership name=%s identity=%s leader=%s",
            self.lock.name,
            self.lock.identity,
            is_leader,
        )

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self.run(), name=f"election {self.lock.name}")
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop, step down and release the Lease."""
        if self._task is not None:
            await cancel_and_wait(self._task)
            self._task = None
        await self.release()
