"""The node agent's operations on volumes, which the controller calls."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from pilotlight.core.rpc import RpcOperation, SendPart
from pilotlight.core.volumes.entries import VOLUME_ID
from snapshotter.errors import OrderRefused, VolumeFailed
from snapshotter.volumes.node_volumes import NodeVolumes

MAX_ENTRIES = 1_000_000
MAX_DIGESTS = 2000
"""Chunks of one upload: so many files may be open for it."""
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")

Check = Callable[[Mapping[str, Any]], None]


class VolumeApi:
    """Translates RPC messages to calls. Owner: the event loop; stateless."""

    def __init__(self, volumes: NodeVolumes | None) -> None:
        self._volumes = volumes

    def operations(self) -> Mapping[str, RpcOperation]:
        """Operations by name."""
        return {
            "scan_volume": self._scan,
            "upload_volume": self._upload,
            "commit_volume": self._commit,
            "reload_volume": self._reload,
            "drop_volume": self._drop,
        }

    @property
    def _require_volumes(self) -> NodeVolumes:
        if self._volumes is None:
            raise VolumeFailed("this node has no volumes", {"reason": "failed"})
        return self._volumes

    async def _scan(self, args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        found = self._require_volumes.scan(args["volume"], max_entries=args["max_entries"])
        async with contextlib.aclosing(found) as answers:
            async for answer in answers:
                await part(answer)
        return {}

    async def _upload(self, args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        await self._require_volumes.upload(args["volume"], args["digests"])
        return {}

    async def _commit(self, args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        await self._require_volumes.committed(args["volume"], version=args["version"])
        return {}

    async def _reload(self, args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        return await self._require_volumes.reload(args["volume"])

    async def _drop(self, args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        await self._require_volumes.drop(args["volume"])
        return {}


def checks() -> Mapping[str, Check]:
    """What the arguments of a controller that is not root must be, by operation."""
    return {
        "scan_volume": _whole("max_entries", MAX_ENTRIES),
        "upload_volume": _digests,
        "commit_volume": _whole("version", 2**62),
        "reload_volume": _volume,
        "drop_volume": _volume,
    }


def _volume(args: Mapping[str, Any]) -> None:
    value = args.get("volume")
    if not (isinstance(value, str) and VOLUME_ID.match(value)):
        raise OrderRefused(f"volume {str(value)[:80]!r} is no id of a volume")


def _whole(key: str, most: int) -> Check:
    def check(args: Mapping[str, Any]) -> None:
        _volume(args)
        value = args.get(key)
        if type(value) is not int or not 0 <= value <= most:
            raise OrderRefused(f"{key} {str(value)[:40]} must be a whole number up to {most}")

    return check


def _digests(args: Mapping[str, Any]) -> None:
    _volume(args)
    given = args.get("digests")
    if not isinstance(given, list) or len(given) > MAX_DIGESTS:
        raise OrderRefused(f"digests must be a list of at most {MAX_DIGESTS}")
    if not all(isinstance(digest, str) and _DIGEST.match(digest) for digest in given):
        raise OrderRefused("digests must be sha256 in hex")
