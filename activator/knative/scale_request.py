"""Requests pods: reports how many are needed to the autoscaler, for as long as starts wait.

With Knative's autoscaler that is `activation_requests.ActivationRequests`: waiting requests that
represent calls. With ours (class `pilotlight.dev`) each activator reports its demand, and the
leader adds it up."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from activator.routing.route_table import CallTarget


class ScaleDemand(Protocol):
    """This activator's demand, as reported to the leader of the autoscaler. Absolute numbers: a
    lost message is corrected by the next one.

    Neither method waits for pods, or raises when the store is unreachable; the report is then
    repeated."""

    async def request(self, key: str, wanted: int) -> None:
        """Report that `wanted` instances of revision `key` are needed here in addition to those
        that this activator has. Notifies the leader."""

    async def withdraw(self, key: str) -> None:
        """Report that none is needed any longer; idempotent."""


class ScaleRequester(Protocol):
    """Requests pods."""

    def requested(self, target: CallTarget) -> AbstractAsyncContextManager[None]:
        """Request a pod for one start, until the end of the context."""

    def status(self, key: str) -> str:
        """Result of the request so far, for error messages; "" when there is none."""

    async def aclose(self) -> None:
        """Withdraw all requests."""


class ReportedDemand:
    """`ScaleRequester` through a Demand: counts the waiting starts. Owner: the event loop."""

    def __init__(self, demand: ScaleDemand) -> None:
        self._demand = demand
        self._waiting: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<ReportedDemand {self._waiting.total()} starts of {len(self._waiting)} revisions>"

    @asynccontextmanager
    async def requested(self, target: CallTarget) -> AsyncIterator[None]:
        """Request a pod for one start, until the end of the context."""
        key = target.key
        self._waiting[key] += 1
        try:
            await self._demand.request(key, self._waiting[key])
            yield
        finally:
            self._waiting[key] -= 1
            if self._waiting[key]:
                await self._demand.request(key, self._waiting[key])
            else:
                del self._waiting[key]
                await self._demand.withdraw(key)

    def status(self, key: str) -> str:
        """The number of requested pods, for error messages."""
        return f"{self._waiting[key]} requested from the autoscaler" if self._waiting[key] else ""

    async def aclose(self) -> None:
        """Withdraw all requests."""
        for key in list(self._waiting):
            await self._demand.withdraw(key)
        self._waiting.clear()
