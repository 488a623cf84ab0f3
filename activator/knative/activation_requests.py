"""Requests that wake a revision, for Knative's own autoscaler: as many as calls wait here, each
held until it is answered.

Our activators stand where Knative's own would: they hold the calls. KPA counts what its activators
and the queue-proxies hold, so a call that waits here is shown to it as a request that waits there:
with the headers that Knative's ingress would set it names the revision, Knative's activator counts
it, tells the autoscaler at once, and holds it until a pod answers. Once there are pods they answer
at once, and are asked again more and more seldom. None of this is a call to the API server."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from activator.routing.route_table import CallTarget
from pilotlight.protocol import WORKER_STATUS
from weight_cache.cookies import no_cookies

log = logging.getLogger(__name__)

MOST = 100
"""Requests held for one revision: KPA adds up to 1000 % a tick, and the next tick sees what still
waits."""
MOST_ALL = 2000
"""Of all revisions together; each has one in any case."""
LOOK_S = 0.25
"""Between looks at how many calls wait."""
PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Between a request that ended and the next in its place; the last one repeats."""
CONNECT_S = 3.0
NAMESPACE, REVISION = "Knative-Serving-Namespace", "Knative-Serving-Revision"

Place = tuple[str, str]
Whereabouts = Callable[[CallTarget], Place]
"""Namespace and name of a revision in the cluster."""


@dataclass(slots=True)
class _Wake:
    """What is held for one revision."""

    place: Place
    starts: int = 0
    held: set[asyncio.Task[None]] = field(default_factory=set)
    keeper: asyncio.Task[None] | None = None


class ActivationRequests:
    """`scale_request.ScaleRequester` by requests.

    Owner: the event loop. `waiting_of`: calls of a revision (by key) that wait here for an
    instance."""

    def __init__(
        self,
        url: str,
        *,
        whereabouts: Whereabouts,
        waiting_of: Callable[[str], int],
        most: int = MOST,
    ) -> None:
        """`url`: of Knative's activator. `most`: held for one revision."""
        self._most = most
        self._whereabouts = whereabouts
        self._waiting_of = waiting_of
        self._wakes: dict[str, _Wake] = {}
        self._said: dict[str, str] = {}
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
    async def asked(self, target: CallTarget) -> AsyncIterator[None]:
        """See ScaleRequester."""
        wake = self._wakes.get(target.key)
        if wake is None:
            wake = self._wakes[target.key] = _Wake(self._whereabouts(target))
            self._said.pop(target.key, None)
        wake.starts += 1
        if wake.keeper is None:
            wake.keeper = asyncio.create_task(
                self._keep(target.key, wake), name=f"wake {wake.place[1]}"
            )
        try:
            yield
        finally:
            wake.starts -= 1
            if not wake.starts:
                self._wakes.pop(target.key, None)
                _let_go(wake)

    def said(self, key: str) -> str:
        """See ScaleRequester."""
        return self._said.get(key, "")

    async def _keep(self, key: str, wake: _Wake) -> None:
        """As many as calls wait, from now on."""
        while True:
            wanted = min(
                self._most, self._waiting_of(key), max(1, MOST_ALL - self._elsewhere(wake))
            )
            while len(wake.held) < wanted:
                task = asyncio.create_task(
                    self._hold(key, wake), name=f"held wake of {wake.place[1]}"
                )
                wake.held.add(task)
                task.add_done_callback(wake.held.discard)
            for surplus in list(wake.held)[wanted:]:
                surplus.cancel()
                wake.held.discard(surplus)
            await asyncio.sleep(LOOK_S)

    def _elsewhere(self, wake: _Wake) -> int:
        return sum(len(other.held) for other in self._wakes.values() if other is not wake)

    async def _hold(self, key: str, wake: _Wake) -> None:
        """One request, and another in its place, until cancelled."""
        namespace, revision = wake.place
        ended = 0
        while True:
            try:
                answer = await self._client.get(
                    WORKER_STATUS, headers={NAMESPACE: namespace, REVISION: revision}
                )
                self._said[key] = f"the request that wakes it was answered {answer.status_code}"
            except httpx.HTTPError as e:
                self._said[key] = f"the request that wakes it failed: {e or type(e).__name__}"
            await asyncio.sleep(PAUSES_S[min(ended, len(PAUSES_S) - 1)])
            ended += 1

    async def aclose(self) -> None:
        """See ScaleRequester."""
        for wake in self._wakes.values():
            _let_go(wake)
        self._wakes.clear()
        await self._client.aclose()


def _let_go(wake: _Wake) -> None:
    for task in (wake.keeper, *wake.held):
        if task is not None:
            task.cancel()
    wake.keeper = None
