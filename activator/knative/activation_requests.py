"""Requests that scale a revision up through Knative's own autoscaler: as many as calls wait here,
each open until it is answered.

Our activators take the place of Knative's: they hold the calls. KPA counts the calls held by its
activators and queue-proxies, so each call that waits here is represented by a request that waits
there. With the headers that Knative's ingress would set it names the revision; Knative's activator
counts it, notifies the autoscaler at once, and holds it until a pod answers. Once there are pods
the requests are answered at once, and are repeated at growing intervals. None of this calls the API
server."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from activator.routing.route_table import CallTarget
from pilotlight.core.backoff import Backoff
from pilotlight.core.transport.cookies import no_cookies
from pilotlight.protocol import WORKER_STATUS

MOST = 100
"""Requests held for one revision: KPA adds up to 1000 % a tick, and the next tick sees what still
waits."""
MOST_ALL = 2000
"""Requests held for all revisions together; each revision has at least one."""
LOOK_S = 0.25
"""Interval between checks of how many calls wait."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 2.0
"""The first and the longest pause between the end of a request and the next one."""
CONNECT_S = 3.0
NAMESPACE, REVISION = "Knative-Serving-Namespace", "Knative-Serving-Revision"

NamespacedName = tuple[str, str]
RevisionNameOf = Callable[[CallTarget], NamespacedName]
"""Namespace and name of a revision in the cluster."""


@dataclass(slots=True)
class _Wake:
    """The requests held for one revision."""

    place: NamespacedName
    starts: int = 0
    held: set[asyncio.Task[None]] = field(default_factory=set)
    task: asyncio.Task[None] | None = None


class ActivationRequests:
    """`scale_request.ScaleRequester` by requests to Knative's activator.

    Owner: the event loop. `waiting_of`: number of calls of a revision (by key) that wait here for
    an instance."""

    def __init__(
        self,
        url: str,
        *,
        revision_name_of: RevisionNameOf,
        waiting_of: Callable[[str], int],
        most: int = MOST,
    ) -> None:
        """`url`: of Knative's activator. `most`: maximum held for one revision."""
        self._most = most
        self._revision_name_of = revision_name_of
        self._waiting_of = waiting_of
        self._wakes: dict[str, _Wake] = {}
        self._results: dict[str, str] = {}
        verify = (
            ssl.create_default_context()
            if url.startswith("https://")
            else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        )
        self._client = httpx.AsyncClient(
            base_url=url,
            verify=verify,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None),
            cookies=no_cookies(),
        )

    def __repr__(self) -> str:
        held = sum(len(wake.held) for wake in self._wakes.values())
        return f"<ActivationRequests {held} held for {len(self._wakes)} revisions>"

    @asynccontextmanager
    async def requested(self, target: CallTarget) -> AsyncIterator[None]:
        """Hold requests for the revision while a start waits."""
        wake = self._wakes.get(target.key)
        if wake is None:
            wake = self._wakes[target.key] = _Wake(self._revision_name_of(target))
            self._results.pop(target.key, None)
        wake.starts += 1
        if wake.task is None:
            wake.task = asyncio.create_task(
                self._maintain(target.key, wake), name=f"wake {wake.place[1]}"
            )
        try:
            yield
        finally:
            wake.starts -= 1
            if not wake.starts:
                self._wakes.pop(target.key, None)
                _cancel(wake)

    def status(self, key: str) -> str:
        """Result of the last request, for error messages; "" when there is none."""
        return self._results.get(key, "")

    async def _maintain(self, key: str, wake: _Wake) -> None:
        """Hold as many requests as calls wait, until cancelled."""
        while True:
            wanted = min(
                self._most, self._waiting_of(key), max(1, MOST_ALL - self._elsewhere(wake))
            )
            while len(wake.held) < wanted:
                task = asyncio.create_task(
                    self._hold_request(key, wake), name=f"held wake of {wake.place[1]}"
                )
                wake.held.add(task)
                task.add_done_callback(wake.held.discard)
            for surplus in list(wake.held)[wanted:]:
                surplus.cancel()
                wake.held.discard(surplus)
            await asyncio.sleep(LOOK_S)

    def _elsewhere(self, wake: _Wake) -> int:
        return sum(len(other.held) for other in self._wakes.values() if other is not wake)

    async def _hold_request(self, key: str, wake: _Wake) -> None:
        """Send a request, and another after it ends, until cancelled."""
        namespace, revision = wake.place
        backoff = Backoff(first_s=FIRST_PAUSE_S, max_s=MAX_PAUSE_S)
        while True:
            try:
                answer = await self._client.get(
                    WORKER_STATUS, headers={NAMESPACE: namespace, REVISION: revision}
                )
                self._results[key] = f"the activation request was answered {answer.status_code}"
            except httpx.HTTPError as e:
                self._results[key] = f"the activation request failed: {e or type(e).__name__}"
            await backoff.pause()

    async def aclose(self) -> None:
        """Cancel all requests and close the connections."""
        for wake in self._wakes.values():
            _cancel(wake)
        self._wakes.clear()
        await self._client.aclose()


def _cancel(wake: _Wake) -> None:
    for task in (wake.task, *wake.held):
        if task is not None:
            task.cancel()
    wake.task = None
