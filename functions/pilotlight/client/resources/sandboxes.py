"""Client methods for sandboxes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pilotlight.client.transport import AsyncTransport, Transport, path_segment
from pilotlight.protocol import CONTENT_JSON
from pilotlight.spec.sandboxes import SANDBOXES_PATH

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRequest:
    """A request to a sandbox: `path` below it, such as `exec`. `is_repeatable`: it may be sent
    again when its connection was lost."""

    sandbox: str
    method: str
    path: str
    query: dict[str, str] = field(default_factory=dict)
    content: bytes = b""
    is_repeatable: bool = False

    def options(self) -> dict[str, Any]:
        """Keywords of the transport's `request`."""
        body = {"content": self.content, "headers": {"content-type": CONTENT_JSON}}
        return {
            "method": self.method,
            "path": f"{SANDBOXES_PATH}{path_segment(self.sandbox)}/{self.path}",
            "params": self.query,
            "repeatable": self.is_repeatable,
            **(body if self.content else {}),
        }


class SandboxResources:
    """Methods of `pilotlight.client.client.Client` for sandboxes."""

    _transport: Transport

    def ask_sandbox(self, request: SandboxRequest) -> Any:
        """Return the answer of a sandbox: JSON, or bytes of a file. Raises NotFound once it has
        ended. Code in the sandbox may have written it: read it with
        `pilotlight.client.sandbox_answers`."""
        return _answer(self._transport.request(**request.options()))


class AsyncSandboxResources:
    """The same for `pilotlight.client.async_client.AsyncClient`."""

    _transport: AsyncTransport

    async def ask_sandbox(self, request: SandboxRequest) -> Any:
        """Asynchronous form of `Client.ask_sandbox`."""
        return _answer(await self._transport.request(**request.options()))


def _answer(response: httpx.Response) -> Any:
    """JSON, or bytes; None for what is no JSON."""
    if not response.headers.get("content-type", "").startswith(CONTENT_JSON):
        return response.content
    with contextlib.suppress(ValueError, RecursionError):
        return response.json()
    return None
