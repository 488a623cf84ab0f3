"""Client methods for dicts and queues."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pilotlight.client.json_stream import Json
from pilotlight.client.resources.volumes import VolumeResources
from pilotlight.client.transport import AsyncTransport, path_segment
from pilotlight.protocol import CONTENT_JSON
from pilotlight.spec.collection import CollectionKind


class CollectionResources(VolumeResources):
    """Methods of `pilotlight.client.client.Client` for dicts and queues."""

    # -- dicts and queues --------------------------------------------------------------------------
    def list_collections(self, kind: CollectionKind) -> list[Json]:
        """List the dicts or queues of the environment by name, with entries and size in bytes."""
        return self._list(kind.path, f"{kind}s")

    def delete_collection(self, kind: CollectionKind, name: str) -> None:
        """Delete a dict or queue, with its values. Raises NotFound."""
        self._transport.request("DELETE", _path(kind, name))

    def operate_collection(
        self, kind: CollectionKind, name: str, body: Mapping[str, Any], *, repeatable: bool
    ) -> Json:
        """Do one operation on a dict or queue (`POST /v1/dicts/{name}`, `/v1/queues/{name}`).
        `repeatable`: send it again when the connection was lost."""
        response = self._transport.request(
            "POST", _path(kind, name), repeatable=repeatable, **_json(body)
        )
        return dict(response.json())


class AsyncCollectionResources:
    """The same for `pilotlight.client.async_client.AsyncClient`."""

    _transport: AsyncTransport

    async def delete_collection(self, kind: CollectionKind, name: str) -> None:
        """Asynchronous form of `Client.delete_collection`."""
        await self._transport.request("DELETE", _path(kind, name))

    async def operate_collection(
        self, kind: CollectionKind, name: str, body: Mapping[str, Any], *, repeatable: bool
    ) -> Json:
        """Asynchronous form of `Client.operate_collection`."""
        response = await self._transport.request(
            "POST", _path(kind, name), repeatable=repeatable, **_json(body)
        )
        return dict(response.json())


def _path(kind: CollectionKind, name: str) -> str:
    return f"{kind.path}/{path_segment(name)}"


def _json(body: Mapping[str, Any]) -> dict[str, Any]:
    """A body for an instance's socket too, which takes bytes."""
    return {"content": json.dumps(body).encode(), "headers": {"content-type": CONTENT_JSON}}
