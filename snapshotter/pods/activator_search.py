"""The search for the activator that has claimed a pod: states the pod to one after the other over
mutual TLS, until one answers that it has."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from pilotlight.core.transport.endpoint import Endpoint
from pilotlight.core.transport.pod_calls import Answer, PodAnswer, PodStatement
from pilotlight.core.transport.tls import explain_tls_error
from snapshotter.pods.call_ends import ActivatorEnd

DIAL_TIMEOUT_S = 3.0
"""Limit of a connection and its handshake: the turn of another pod waits for it."""
LAST_S = 10.0
"""How long an activator that did not answer is asked after the others."""
MAX_REMEMBERED = 1024
"""Pods whose activator is remembered after their last connection: more than run on a node."""
_LOG_SAYS = "the node agent's log says why"
WAY_OUT = (
    "to call without it, use an API key: set PILOTLIGHT_API_KEY and PILOTLIGHT_URL in a secret of "
    "the function"
)


class NotConnected(Exception):
    """Raised when no activator takes a pod's connection; it is answered with `status`.

    Attributes:
        detail: for the log alone: it has names and addresses of the cluster."""

    def __init__(self, status: int, message: str, *, detail: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.detail = detail


class ActivatorSearch:
    """Connections of this node to all activators, and which of them had claimed a pod. Owner: the
    event loop."""

    def __init__(
        self,
        activators: Endpoint,
        *,
        resolve: Callable[[Endpoint], Awaitable[Sequence[str]]] | None = None,
    ) -> None:
        """`activators`: `https://` name that resolves to all activators, and is in the certificate
        of each. `resolve`: None = with DNS."""
        assert activators.credentials is not None
        self._activators = activators
        self._resolve = resolve or addresses_of
        self._context = activators.credentials.client_context()
        self._claimed_by: dict[str, str] = {}
        self._idle: dict[str, list[ActivatorEnd]] = {}
        self._ends: set[ActivatorEnd] = set()
        self._failed_at: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<ActivatorSearch {self._activators} {len(self._ends)} connections>"

    async def find(self, statement: PodStatement) -> ActivatorEnd:
        """Connect to the activator that has claimed the pod: first to the one that had. Raises
        NotConnected."""
        failures: list[str] = []
        known = self._claimed_by.get(statement.pod)
        if known is not None:
            if (end := await self._request(known, statement, failures)) is not None:
                return end
            self._claimed_by.pop(statement.pod, None)
        for address in sorted(await self._addresses(failures), key=self._has_failed):
            if address == known:
                continue
            if (end := await self._request(address, statement, failures)) is not None:
                return end
        if failures:
            raise NotConnected(
                503,
                f"no activator that answers has claimed this pod; {_LOG_SAYS}",
                detail="; ".join(failures),
            )
        raise NotConnected(
            403,
            "no activator has claimed this pod: functions call others while they run a call, and "
            "not in enter(snap=False), in the startup of a web application or in exit(); "
            f"{WAY_OUT}",
        )

    async def _addresses(self, failures: list[str]) -> Sequence[str]:
        try:
            return await self._resolve(self._activators)
        except OSError as e:
            failures.append(f"{self._activators.host} cannot be resolved: {e.strerror or e}")
            return ()

    async def _request(
        self, address: str, statement: PodStatement, failures: list[str]
    ) -> ActivatorEnd | None:
        """Ask one activator; None if it has not claimed the pod, or does not answer, which is added
        to `failures`. Raises NotConnected for a refusal."""
        answer: PodAnswer | None = None
        try:
            while answer is None and (end := self._pop_idle(address)) is not None:
                # one that was kept may be of an activator that has been restarted
                with suppress(ConnectionError, ssl.SSLError, ValueError):
                    answer = await end.ask(statement)
            if answer is None:
                end = await self._dial(address)
                answer = await end.ask(statement)
        except (OSError, ValueError) as e:  # TimeoutError and ssl.SSLError are OSErrors
            self._failed_at[address] = time.monotonic()
            name = f"the activator at {address}"
            failures.append(
                explain_tls_error(e, name)
                if isinstance(e, ssl.SSLError)
                else f"{name} does not answer: {e or type(e).__name__}"
            )
            return None
        self._failed_at.pop(address, None)
        assert end is not None
        if answer.answer is Answer.LEASED:
            self._remember(statement.pod, address)
            return end
        end.keep()
        if answer.answer is Answer.NOT_LEASED:
            return None
        if answer.answer is Answer.REFUSED:
            raise NotConnected(403, answer.why)
        raise NotConnected(
            503,
            f"the activator does not know the agent of this node, or not yet; {_LOG_SAYS}",
            detail=answer.why,
        )

    def _has_failed(self, address: str) -> bool:
        """Whether an activator did not answer a moment ago: such a one is asked last."""
        failed_at = self._failed_at.get(address)
        return failed_at is not None and time.monotonic() - failed_at < LAST_S

    async def _dial(self, address: str) -> ActivatorEnd:
        """Open a connection. Raises OSError."""
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            _, end = await asyncio.get_running_loop().create_connection(
                lambda: ActivatorEnd(self._ends, self._idle.setdefault(address, [])),
                address,
                self._activators.port,
                ssl=self._context,
                server_hostname=self._activators.host,
                ssl_handshake_timeout=DIAL_TIMEOUT_S,
            )
        return end

    def _pop_idle(self, address: str) -> ActivatorEnd | None:
        idle = self._idle.get(address)
        return idle.pop() if idle else None

    def _remember(self, pod: str, activator: str) -> None:
        self._claimed_by.pop(pod, None)
        self._claimed_by[pod] = activator
        if len(self._claimed_by) > MAX_REMEMBERED:
            del self._claimed_by[next(iter(self._claimed_by))]

    async def aclose(self) -> None:
        """End all connections."""
        ends = list(self._ends)
        for end in ends:
            end.abort()
        await asyncio.gather(*(end.closed for end in ends))


async def addresses_of(activators: Endpoint) -> Sequence[str]:
    """The addresses that the name of an endpoint has now. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(
        activators.host, activators.port, type=socket.SOCK_STREAM
    )
    return list(dict.fromkeys(str(where[0]) for *_, where in found))
