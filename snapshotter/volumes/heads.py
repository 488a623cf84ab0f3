"""Asks the controller what a volume is, and fetches its newest manifest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from pilotlight.core.settings import SettingsInvalid
from pilotlight.core.transport.controller_client import controller_client
from pilotlight.core.transport.endpoint import Endpoint
from pilotlight.core.volumes.entries import VOLUME_ID
from snapshotter.errors import VolumeFailed, VolumeUnknown

if TYPE_CHECKING:
    import httpx

VOLUMES_PATH = "/internal/volumes"
"""`GET <path>/<tenant>/<environment>/<name>`, and `…/manifest`, with the node's token."""
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeHead:
    """A volume, and the version of its newest manifest."""

    id: str
    version: int


class VolumeHeads:
    """Reads volumes of the controller. Owner: the event loop; connects on the first call."""

    def __init__(self, controller: Endpoint, token: Callable[[], str]) -> None:
        """`token` reads that of the node when it is needed: the controller may make the key."""
        self._controller = controller
        self._token = token
        self._made: httpx.AsyncClient | None = None

    async def head(self, key: tuple[str, str, str]) -> VolumeHead:
        """Return the volume of that tenant, environment and name. Raises VolumeUnknown,
        VolumeFailed."""
        import httpx

        try:
            answer = await self._client().get(_path(key))
            self._require(answer, key)
            body = answer.json()
            head = VolumeHead(id=str(body["id"]), version=int(body["version"]))
        except (httpx.HTTPError, SettingsInvalid, ValueError, KeyError, TypeError) as e:
            raise VolumeFailed(
                f"the controller does not say what it is: {e!r}", {"reason": "controller"}
            ) from e
        if not VOLUME_ID.match(head.id):
            raise VolumeFailed(f"{head.id[:40]!r} is no volume's id", {"reason": "controller"})
        return head

    async def fetch(self, key: tuple[str, str, str], volume_id: str, target: Path) -> int:
        """Write the newest manifest to `target`, which nothing here parses; returns its version.
        Raises VolumeUnknown (also if the name is another volume's by now), VolumeFailed."""
        import httpx

        try:
            async with self._client().stream("GET", f"{_path(key)}/manifest") as answer:
                self._require(answer, key)
                if answer.headers.get("pilotlight-volume") != volume_id:
                    raise VolumeUnknown(f"volume {key[2]!r} was deleted, and created anew")
                with target.open("wb") as file:
                    async for piece in answer.aiter_bytes():
                        await asyncio.to_thread(file.write, piece)
                return int(answer.headers["pilotlight-volume-version"])
        except (httpx.HTTPError, SettingsInvalid, ValueError, KeyError) as e:
            raise VolumeFailed(
                f"its manifest cannot be fetched of the controller: {e!r}", {"reason": "controller"}
            ) from e

    async def aclose(self) -> None:
        """Close connections."""
        if self._made is not None:
            await self._made.aclose()

    def _client(self) -> httpx.AsyncClient:
        if self._made is None:
            self._made = controller_client(
                self._controller, token=self._token(), timeout_s=TIMEOUT_S
            )
        return self._made

    @staticmethod
    def _require(answer: httpx.Response, key: tuple[str, str, str]) -> None:
        if answer.status_code == 404:
            raise VolumeUnknown(
                f"there is no volume {key[2]!r} in environment {key[1]!r}: it was deleted; "
                f"`pilotlight volume create {key[2]}` creates an empty one"
            )
        if answer.status_code != 200:
            raise VolumeFailed(
                f"the controller answered {answer.status_code}", {"reason": "controller"}
            )


def _path(key: tuple[str, str, str]) -> str:
    return "/".join((VOLUMES_PATH, *(quote(part, safe="") for part in key)))
