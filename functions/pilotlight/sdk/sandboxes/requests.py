"""Requests to one sandbox, as steps of operations."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pilotlight.client.async_client import AsyncClient
from pilotlight.client.client import Client
from pilotlight.client.resources.sandboxes import SandboxRequest


@dataclass(frozen=True, slots=True)
class SandboxStep:
    """One request to a sandbox."""

    request: SandboxRequest

    def send(self, client: Client) -> Any:
        """Return its answer."""
        return client.ask_sandbox(self.request)

    async def send_aio(self, client: AsyncClient) -> Any:
        """Return its answer."""
        return await client.ask_sandbox(self.request)


@dataclass(frozen=True, slots=True)
class CallStep:
    """A question about the call of a sandbox: its record, once it has ended or after `wait_s`."""

    call: str
    wait_s: float = 0.0

    def send(self, client: Client) -> Any:
        """Return the record."""
        return client.call(self.call, wait_s=self.wait_s)

    async def send_aio(self, client: AsyncClient) -> Any:
        """Return the record."""
        return await client.call(self.call, wait_s=self.wait_s)


@dataclass(frozen=True, slots=True)
class CancelStep:
    """The request to end a sandbox."""

    call: str

    def send(self, client: Client) -> None:
        """Cancel its call."""
        client.cancel(self.call)

    async def send_aio(self, client: AsyncClient) -> None:
        """Cancel its call."""
        await client.cancel(self.call)


def sandbox_step(
    sandbox: str,
    method: str,
    place: str,
    /,
    *,
    json_body: Any = None,
    content: bytes = b"",
    repeatable: bool = False,
    **query: Any,
) -> SandboxStep:
    """Return a request; `query` without its values None. `repeatable`: it may be sent again when
    its connection was lost."""
    body = content if json_body is None else json.dumps(json_body).encode()
    texts = {
        name: str(int(value) if isinstance(value, bool) else value)
        for name, value in query.items()
        if value is not None
    }
    return SandboxStep(
        SandboxRequest(
            sandbox=sandbox,
            method=method,
            path=place,
            query=texts,
            content=body,
            is_repeatable=repeatable or method == "GET",
        )
    )
