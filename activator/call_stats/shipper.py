"""Sends observations to the controller: each second, in numbered batches, so that duplicates count
once.

While the controller is unreachable the counts are summed here, by minute, for up to `KEPT_MINUTES`;
a batch without an answer is sent again unchanged, under its number. This is not billing data: the
last second of a killed process is lost."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import httpx

from activator.call_stats.observer import CallStats
from pilotlight.core.backoff import Backoff
from pilotlight.core.transport.controller_client import controller_client
from pilotlight.core.transport.endpoint import Endpoint
from pilotlight.protocol import OBSERVATIONS_PATH
from pilotlight.spec.observations import Observation, add_observation

log = logging.getLogger(__name__)

EVERY_S = 1.0
KEPT_MINUTES = 15
"""A controller that was unreachable for longer has missed alarms anyway, and a minute of a thousand
functions is megabytes."""
BATCH = 1000
"""Maximum observations of a post, about a megabyte."""
MAX_KEPT = 50_000
"""Maximum observations in memory."""
FIRST_RETRY_S, MAX_RETRY_S = 1.0, 5.0
Key = tuple[str, str, str, str, int]


class StatsSink(Protocol):
    """Destination of observations."""

    async def accept(self, body: dict[str, Any]) -> bool:
        """Store a batch; returns False if it was stored before. Raises httpx.HTTPError if it did
        not arrive, or is invalid."""

    async def aclose(self) -> None:
        """Close connections."""


class ControllerReceiver:
    """The controller's endpoint."""

    def __init__(self, *, controller: Endpoint, token: str) -> None:
        self._client = controller_client(controller, token=token, timeout_s=10.0)

    async def accept(self, body: dict[str, Any]) -> bool:
        """Send a batch to the controller."""
        response = await self._client.post(OBSERVATIONS_PATH, json=body)
        response.raise_for_status()
        return bool(response.json()["accepted"])

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()


class PendingStats:
    """Observations that were not posted yet, summed by revision, arm and minute. The oldest minutes
    are dropped if there are too many."""

    def __init__(self) -> None:
        self._by_key: dict[Key, Observation] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, observations: Iterable[Observation]) -> None:
        """Add observations."""
        for one in observations:
            key = (one.tenant, one.function_id, one.revision, one.arm, one.minute)
            known = self._by_key.get(key)
            if known is None:
                self._by_key[key] = one
            else:
                add_observation(known, one)

    def drop_old(self, *, before: int) -> int:
        """Drop minutes before `before`, and the oldest observations beyond MAX_KEPT. Returns the
        number of dropped observations."""
        old = [key for key in self._by_key if key[-1] < before]
        if (beyond := len(self._by_key) - len(old) - MAX_KEPT) > 0:
            old += sorted(
                (key for key in self._by_key if key[-1] >= before), key=lambda key: key[-1]
            )[:beyond]
        for key in old:
            del self._by_key[key]
        return len(old)

    def pop(self, limit: int) -> list[Observation]:
        """Remove and return the oldest observations."""
        keys = sorted(self._by_key, key=lambda key: key[-1])[:limit]
        return [self._by_key.pop(key) for key in keys]


class StatsShipper:
    """The task that posts statistics. Run `run()` until cancelled, call `aclose()` once at the
    end."""

    def __init__(
        self,
        observer: CallStats,
        receiver: StatsSink,
        *,
        activator: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock`: wall time in seconds since the epoch."""
        self._observer = observer
        self._receiver = receiver
        self._activator = activator
        self._clock = clock
        self._life = secrets.token_hex(8)
        self._sequence = 0
        self._pending = PendingStats()
        self._sent: Sequence[Observation] = ()
        self._counted_since = clock()
        self._backoff = Backoff(first_s=FIRST_RETRY_S, max_s=MAX_RETRY_S)
        self.lost = 0

    def __repr__(self) -> str:
        return (
            f"<StatsShipper {self._sequence} posts, {len(self._pending) + len(self._sent)} kept, "
            f"{self.lost} lost>"
        )

    async def run(self) -> None:
        """Count and post until cancelled."""
        while True:
            await asyncio.sleep(self._until_next_s())
            self.count()
            if not await self.post():
                await self._backoff.pause()

    def _until_next_s(self) -> float:
        """Time to the next whole second of the clock, so that a minute's last calls count for that
        minute."""
        return EVERY_S - self._clock() % EVERY_S

    def count(self) -> None:
        """Store the counts since the last time for the minute in which that began, and drop old
        ones."""
        now = self._clock()
        since, self._counted_since = self._counted_since, now
        self._pending.add(self._observer.drain(int(min(since, now) // 60)))
        oldest = int(now // 60) - KEPT_MINUTES
        lost = self._pending.drop_old(before=oldest)
        # if it arrived nevertheless, the rest of it is not stored either
        lost += sum(one.minute < oldest for one in self._sent)
        self._sent = [one for one in self._sent if one.minute >= oldest]
        if lost:
            self.lost += lost
            log.error(
                "event=observations_lost count=%d: the controller was unreachable for too long",
                lost,
            )

    async def post(self) -> bool:
        """Post the stored observations, until none is left or a post fails; returns whether all
        were posted."""
        while self._sent or self._pending:
            if not self._sent:
                self._sent = self._pending.pop(BATCH)
                self._sequence += 1
            if not await self._post():
                return False
        return True

    async def _post(self) -> bool:
        observations = [one.to_json() for one in self._sent]
        body = {
            "activator": self._activator,
            "life": self._life,
            "sequence": self._sequence,
            "observations": observations,
        }
        try:
            await self._receiver.accept(body)
        except httpx.HTTPStatusError as e:
            if e.response.status_code < 500:  # a retry cannot succeed, but the next batch may
                log.error(
                    "event=observations_refused count=%d status=%d",
                    len(self._sent),
                    e.response.status_code,
                )
                self.lost += len(self._sent)
                self._sent = ()
                return True
            return self._on_failure(e)
        except httpx.HTTPError as e:
            return self._on_failure(e)
        self._backoff.reset()
        self._sent = ()
        return True

    def _on_failure(self, error: httpx.HTTPError) -> bool:
        if not self._backoff.failures:
            log.warning("event=observations_not_posted error=%r", error)
        return False

    async def aclose(self) -> None:
        """Post the remaining observations once, and close the connections."""
        self.count()
        await self.post()
        await self._receiver.aclose()
