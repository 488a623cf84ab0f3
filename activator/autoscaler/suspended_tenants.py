"""Ends what runs for tenants that are suspended, after a grace, and of deleted ones at once.

New calls of a suspended tenant are refused, and its idle instances stop, at once
(`access.grants`, `AutoscalerLoop.apply`). What runs may be long: sandboxes, WebSockets, streams,
submitted calls, commands in instances. It has GRACE_S to end, and then ends with its instance. Its
calls of other tenants' functions end then, too, and their instances stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from activator.balancing.instance import TENANT_SUSPENDED
from activator.balancing.throttler import Throttler
from pilotlight import errors

GRACE_S: Final = 30.0
"""Ordinary calls end in it; a suspension by mistake can be taken back within it."""


class SuspendedTenants:
    """Since when tenants are suspended, as seen here. Owner: the event loop.

    `is_suspended`: whether this tenant's calls must be refused. `is_deleted`: whether it is
    deleted, and has no grace."""

    def __init__(
        self,
        is_suspended: Callable[[str], bool],
        is_deleted: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._is_suspended = is_suspended
        self._is_deleted = is_deleted
        self._since: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<SuspendedTenants {len(self._since)}>"

    def end_calls(self, throttler: Throttler, now: float) -> None:
        """Once the grace has passed: stop the instances of a suspended tenant's revision and fail
        its waiting calls; end the calls that suspended tenants make of another's. `now`: monotonic
        seconds."""
        for tenant in [one for one in self._since if not self._is_suspended(one)]:
            del self._since[tenant]
        if self._is_over(throttler.target.tenant, now):
            throttler.refuse_waiting(errors.Forbidden("the tenant of this function is suspended"))
            throttler.stop_all(TENANT_SUSPENDED)
            return
        error = errors.Forbidden("the tenant that makes this call is suspended")
        throttler.refuse_waiting(error, lambda tenant: self._is_over(tenant, now))
        for instance in tuple(throttler.instances.values()):
            for attempt in tuple(instance.running.values()):
                if self._is_over(attempt.calling_tenant, now):
                    attempt.cut(error)

    def _is_over(self, tenant: str, now: float) -> bool:
        """Whether the tenant is suspended, and its grace has passed."""
        if not tenant or not self._is_suspended(tenant):
            return False
        grace_s = 0.0 if self._is_deleted(tenant) else GRACE_S
        return now - self._since.setdefault(tenant, now) >= grace_s
