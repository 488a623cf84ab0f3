"""A weight cache without bytes, on the real wire: it remembers which models are here, in memory,
pinned, damaged, and what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pilotlight.core.rpc import SendPart, serve_rpc
from weight_cache.errors import OriginUnavailable, WeightCacheError

SIZE_BYTES = 100


@dataclass
class SmallCache:
    """Owner: the test's loop.

    Fetches raise `failure`, or find nothing of what is `absent`; while `gate` is not set they wait
    in the middle."""

    here: set[str] = field(default_factory=set)
    in_memory: set[str] = field(default_factory=set)
    pinned: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    corrupt: list[str] = field(default_factory=list)
    absent: set[str] = field(default_factory=set)
    failure: WeightCacheError | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()

    async def serve(self, path: Path) -> asyncio.Server:
        """Answer on the socket at `path`."""
        operations = {
            "stat": self._stat,
            "list": self._list,
            "predict": self._predict,
            "prefetch": self._prefetch,
            "verify": self._verify,
            "pin": self._pin,
            "unpin": self._unpin,
            "drop": self._drop,
        }
        return await serve_rpc(path, operations, _describe)

    async def _stat(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        figures = (
            "used_bytes",
            "leases",
            "arriving",
            "hits",
            "misses",
            "fetched_bytes",
            "evicted_models",
            "evicted_bytes",
        )
        return {
            **dict.fromkeys(figures, 0),
            "max_bytes": 1 << 40,
            "models": len(self.here),
            "quarantined_files": 0,
        }

    async def _list(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        common = {"size_bytes": SIZE_BYTES, "files": 1, "leases": 0, "last_used_at": 0.0}
        return {
            "models": [
                {"manifest": m, **common, "is_pinned": m in self.pinned} for m in sorted(self.here)
            ],
            "leases": [],
        }

    async def _predict(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        manifest = args["manifest"]
        if manifest not in self.here:
            return {"tier": "origin", "seconds": None, "missing": {}}
        if manifest in self.in_memory:
            return {"tier": "dram", "seconds": 0.0, "missing": {}}
        return {"tier": "nvme", "seconds": 0.5, "missing": {"nvme": SIZE_BYTES}}

    async def _prefetch(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        manifest = self._note("prefetch", args)
        try:
            await part({"done_bytes": SIZE_BYTES // 2, "total_bytes": SIZE_BYTES})
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        self._fetch(manifest)
        return {}

    async def _verify(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        manifest = self._note("verify", args)
        return {"corrupt": self.corrupt if manifest in self.here else []}

    async def _pin(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        manifest = self._note("pin", args)
        self._fetch(manifest)
        self.pinned.add(manifest)
        return {}

    async def _unpin(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        manifest = self._note("unpin", args)
        was_pinned = manifest in self.pinned
        self.pinned.discard(manifest)
        return {"unpinned": was_pinned}

    async def _drop(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        manifest = self._note("drop", args)
        if manifest in self.held | self.pinned or manifest not in self.here:
            return {"dropped": False}
        self.here.remove(manifest)
        return {"dropped": True}

    def _fetch(self, manifest: str) -> None:
        if self.failure is not None:
            raise self.failure
        if manifest in self.absent:
            raise OriginUnavailable(f"the origin has no {manifest}")
        self.here.add(manifest)

    def _note(self, op: str, args: Mapping[str, Any]) -> str:
        self.asked.append((op, args["manifest"]))
        return str(args["manifest"])


def _describe(error: Exception) -> tuple[str, str, Mapping[str, Any]] | None:
    return (error.code, str(error), {}) if isinstance(error, WeightCacheError) else None
