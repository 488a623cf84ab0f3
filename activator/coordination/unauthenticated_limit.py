"""Rate limit of unauthenticated requests over all activators: the local bucket decides at once, the
shared one a moment later.

Authentication is synchronous, so it cannot wait for Redis: each failed attempt that the local
bucket admits is reported in the background, and an address whose shared bucket is empty is refused
here until it has a token again. A client that spreads over N activators gains the attempts of one
round trip, not N times the rate. While the shared state does not answer, only the local bucket
applies."""

from __future__ import annotations

import asyncio
import logging
import time

from activator.balancing.global_queue import UnauthenticatedRateLimiter, network_of
from activator.coordination.state import SharedState, SharedStateUnreachable
from pilotlight import errors
from pilotlight.core.background_tasks import cancel_all

log = logging.getLogger(__name__)

MAX_REPORTS = 256
"""Most concurrent reports; further attempts are counted locally only, so that a flood does not
become a queue."""


class SharedUnauthenticatedLimit(UnauthenticatedRateLimiter):
    """Local rate limit combined with the shared one. Owner: the event loop."""

    def __init__(self, state: SharedState, *, rate_per_s: float) -> None:
        super().__init__(rate_per_s=rate_per_s)
        self._state = state
        self._rate = rate_per_s
        self._refused_until: dict[str, float] = {}
        self._reports: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return (
            f"<SharedUnauthenticatedLimit {len(self._refused_until)} refused, {len(self._reports)} "
            f"reports under way, {self._rate:g}/s each>"
        )

    def guard(self, address: str, now: float) -> None:
        """Refuse an address that is over either limit, without counting an attempt."""
        super().guard(address, now)
        self._refuse(network_of(address), now)

    def check(self, address: str, now: float) -> None:
        """Count one failed attempt, and report it to the shared state. Raises TooManyRequests."""
        super().check(address, now)
        address = network_of(address)
        self._refuse(address, now)
        if len(self._reports) < MAX_REPORTS:
            report = asyncio.get_running_loop().create_task(
                self._report(address), name="stranger report"
            )
            self._reports.add(report)
            report.add_done_callback(self._reports.discard)

    def _refuse(self, address: str, now: float) -> None:
        until = self._refused_until.get(address, 0.0)
        if until > now:
            raise errors.TooManyRequests(
                "too many requests without a valid API key from this address",
                retry_after_s=until - now,
            )
        self._refused_until.pop(address, None)

    async def _report(self, address: str) -> None:
        try:
            wait_s = await self._state.stranger_wait_s(
                address, rate_per_s=self._rate, burst=2 * self._rate
            )
        except SharedStateUnreachable:
            return  # the heartbeat logs it once
        if wait_s > 0:
            now = time.monotonic()
            self._refused_until = {
                a: until for a, until in self._refused_until.items() if until > now
            } | {address: now + wait_s}

    async def aclose(self) -> None:
        """Cancel the reports in progress."""
        await cancel_all(self._reports)
