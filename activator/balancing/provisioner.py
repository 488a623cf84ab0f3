"""What starts of all revisions share: the fleet that runs instances, the secrets that they get,
admission, and the allowances of several activators. It decides nothing about one revision; that is
`instance_lifecycle`."""

from __future__ import annotations

import os
from collections.abc import Callable

from activator.balancing.fleet import Fleet
from activator.coordination.state import InstanceLeases
from activator.fairness.start_admission import StartAdmission
from activator.routing.call_target import CallTarget
from snapshotter.types import InstanceId, InstanceInfo


class InstanceProvisioner:
    """Provides the instances of one activator. Owner: the event loop.

    Attributes:
        gate: admission of starts.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        secret_env: Callable[[CallTarget], dict[str, str]],
        gate: StartAdmission | None = None,
        leases: InstanceLeases | None = None,
    ) -> None:
        """`gate`: None admits every start. `leases`: None when this activator is the only one."""
        self.fleet = fleet
        self.gate = gate or StartAdmission()
        self._secret_env = secret_env
        self._leases = leases
        self._allowances: dict[str, list[tuple[str, int]]] = {}

    def __repr__(self) -> str:
        return f"<InstanceProvisioner {self.fleet!r} {self.gate!r}>"

    @staticmethod
    def new_instance_id() -> InstanceId:
        """Return the id of an instance that is going to be started: `i-` and 16 hex digits."""
        return InstanceId("i-" + os.urandom(8).hex())

    async def start(self, target: CallTarget, instance_id: str) -> InstanceInfo:
        """Start an instance with its secrets. Raises what `Fleet.start` raises, and Unavailable
        for a missing secret."""
        return await self.fleet.start(target, InstanceId(instance_id), self._secret_env(target))

    async def try_acquire(self, instance_id: str, target: CallTarget) -> bool:
        """Acquire the allowances of the revision and of its tenant: all or none."""
        if self._leases is None:
            return True
        taken = self._allowances.setdefault(instance_id, [])
        for key, amount, limit in (
            (target.key, 1, target.spec.scaling.max_instances),
            *self.gate.pools(target),
        ):
            if limit is None:
                self._leases.record_held(key, amount)
                taken.append((key, amount))
                continue
            granted = await self._leases.acquire_instances(key, amount, limit)
            if granted:
                taken.append((key, granted))
            if granted < amount:
                self._release_allowances(instance_id)
                return False
        return True

    def adopt(self, instance_id: str, target: CallTarget) -> None:
        """Count an instance that existed before."""
        self.gate.adopt(instance_id, target)
        if self._leases is not None:
            pools = [
                (target.key, 1),
                *((key, amount) for key, amount, _ in self.gate.pools(target)),
            ]
            self._allowances[instance_id] = pools
            for key, amount in pools:
                self._leases.record_held(key, amount)

    def release(self, instance_id: str) -> None:
        """Release the allowances and quotas of an ended instance."""
        self._release_allowances(instance_id)
        self.gate.release(instance_id)

    def _release_allowances(self, instance_id: str) -> None:
        for key, amount in self._allowances.pop(instance_id, ()):
            if self._leases is not None:
                self._leases.release(key, amount)

    def share(self, count: int) -> int:
        """Return this activator's part of a number that all activators provide together."""
        return count if self._leases is None else self._leases.share(count)
