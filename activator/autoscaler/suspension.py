"""Ends what runs for tenants that are suspended, after a grace.

New calls of a suspended tenant are refused, and its idle instances stop, at once
(`access.grants`, `AutoscalerLoop.apply`). What runs may be long: sandboxes, WebSockets, streams,
submitted calls, commands in instances. It has GRACE_S to end, and then ends with its instance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from activator.balancing.instance import SUSPENDED
from activator.balancing.throttler import Throttler
from pilotlight import errors

GRACE_S: Final = 30.0
"""Ordinary calls end in it; a suspension by mistake can be taken back within it."""


class Suspensions:
    """Since when tenants are suspended, as seen here. Owner: the event loop.

    `is_suspended`: whether this tenant's calls must be refused."""

    def __init__(self, is_suspended: Callable[[str], bool], *, grace_s: float = GRACE_S) -> None:
        self._is_suspended = is_suspended
        self._grace_s = grace_s
        self._since: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Suspensions of {len(self._since)} tenants>"

    def end_calls(self, throttler: Throttler, now: float) -> None:
        """Stop the instances of a suspended tenant's revision, and fail its waiting calls, once the
        grace has passed. `now`: monotonic seconds."""
        tenant = throttler.target.tenant
        if not self._is_suspended(tenant):
            self._since.pop(tenant, None)
        elif now - self._since.setdefault(tenant, now) >= self._grace_s:
            throttler.refuse_waiting(errors.Forbidden("the tenant of this function is suspended"))
            throttler.stop_all(SUSPENDED)
