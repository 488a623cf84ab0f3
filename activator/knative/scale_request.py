"""What makes pods come: whoever decides on their number is told how many are wanted, for as long as
starts wait.

With Knative's autoscaler that is `activation_requests.ActivationRequests`: requests that wait, as
calls would. With ours (class `pilotlight.dev`) each activator states its demand, and the leader
adds them up."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from activator.routing.route_table import CallTarget


class Demand(Protocol):
    """What this activator wants, as the leader of the autoscaler sees it. Absolute numbers: a lost
    message heals with the next one.

    Neither method waits for pods, or raises because the store is away: what could not be said is
    said again."""

    async def ask(self, key: str, wanted: int) -> None:
        """`wanted` instances of revision `key` are needed here beyond those that this activator
        has; the leader is poked."""
        ...

    async def withdraw(self, key: str) -> None:
        """None is needed any more; idempotent."""
        ...


class ScaleRequester(Protocol):
    """Makes pods come."""

    def asked(self, target: CallTarget) -> AbstractAsyncContextManager[None]:
        """One start waits for a pod, from here to the end of the context."""
        ...

    def said(self, key: str) -> str:
        """What came of it of late, for people; "" when there is nothing to say."""
        ...

    async def aclose(self) -> None:
        """Ask no more."""
        ...


class ReportedDemand:
    """`ScaleRequester` by a Demand: counts the starts that wait. Owner: the event loop."""

    def __init__(self, demand: Demand) -> None:
        self._demand = demand
        self._waiting: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<ReportedDemand {self._waiting.total()} starts of {len(self._waiting)} revisions>"

    @asynccontextmanager
    async def asked(self, target: CallTarget) -> AsyncIterator[None]:
        """See ScaleRequester."""
        key = target.key
        self._waiting[key] += 1
        try:
            await self._demand.ask(key, self._waiting[key])
            yield
        finally:
            self._waiting[key] -= 1
            if self._waiting[key]:
                await self._demand.ask(key, self._waiting[key])
            else:
                del self._waiting[key]
                await self._demand.withdraw(key)

    def said(self, key: str) -> str:
        """See ScaleRequester."""
        return f"{self._waiting[key]} asked of the autoscaler" if self._waiting[key] else ""

    async def aclose(self) -> None:
        """See ScaleRequester: what is still wanted is withdrawn."""
        for key in list(self._waiting):
            await self._demand.withdraw(key)
        self._waiting.clear()
