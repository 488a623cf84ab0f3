"""Any path of an API server through the official asynchronous client: what tests use where its
generated methods hide the answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

Json = dict[str, Any]
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"


@dataclass(frozen=True, kw_only=True)
class Got:
    """An answer: `body` is {} where it was no JSON."""

    status: int
    body: Json
    warnings: tuple[str, ...]
    headers: Mapping[str, str]

    @property
    def version(self) -> str:
        """resourceVersion of the object."""
        return str(self.body["metadata"]["resourceVersion"])


class RawClient:
    """Requests without exceptions for statuses. Owner: one event loop; a context manager."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig
        self.api: Any = None

    async def __aenter__(self) -> Self:
        from kubernetes.aio import config  # by itself it imports 1,700 modules

        self.api = await config.new_client_from_config(str(self._kubeconfig))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.api.close()

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        media: str = "application/json",
    ) -> Got:
        """One request; `path` may carry a query of its own."""
        response = await self._open(method, path, query or {}, body, media=media)
        async with response:
            data = await response.read()
        warnings = tuple(response.headers.getall("Warning", []))
        is_json = "json" in response.headers.get("Content-Type", "")
        return Got(
            status=response.status,
            body=json.loads(data) if is_json else {},
            warnings=warnings,
            headers=dict(response.headers),
        )

    async def apply(
        self, path: str, body: Json, *, manager: str = "one", force: bool = False, **query: str
    ) -> Got:
        """Server-side apply."""
        query = {"fieldManager": manager, **({"force": "true"} if force else {}), **query}
        return await self.ask("PATCH", path, body, query=query, media=APPLY)

    @asynccontextmanager
    async def watch(self, path: str, **query: str) -> AsyncIterator[AsyncIterator[Json]]:
        """Events of a watch, as they come; the iterator ends with the stream."""
        asked = {"watch": "true", **query}
        response = await self._open("GET", path, asked)
        assert response.status == 200, await response.text()

        async def events() -> AsyncIterator[Json]:
            async for line in response.content:
                yield json.loads(line)

        try:
            yield events()
        finally:
            response.close()

    async def _open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Any = None,
        *,
        media: str = "application/json",
    ) -> aiohttp.ClientResponse:
        response: aiohttp.ClientResponse = await self.api.call_api(
            path,
            method,
            path_params={},
            query_params=list(query.items()),
            header_params={"Accept": "application/json", "Content-Type": media},
            body=body,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _request_timeout=aiohttp.ClientTimeout(total=30),
        )
        return response
