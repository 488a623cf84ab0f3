"""Reads the online features of calls and fills what cannot be read from defaults.

A Template has a reader without connections: it is opened in the instance, after the fork or the
restore. Until then, in the warm-up and the proof of a snapshot, calls get all defaults."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from pilotlight.errors import InvalidInput
from pilotlight.protocol import DEGRADED_FEATURES, HEADER_DEGRADED
from pilotlight.spec.features.sources import Features, FeaturesSpec, RedisFeatures
from pilotlight.worker.features.redis_client import ReadFailed, RedisAddress, RedisClient

REASONS: Final = ("unavailable", "deadline", "invalid", "stale", "missing")
"""Why a feature is its default, the worst first."""
MAX_AHEAD_S: Final = 300.0
"""A value that was written this much later than now is not from a clock that runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Sources of one server and deadline, which one MGET reads."""

    url: str
    within_s: float
    sources: tuple[RedisFeatures, ...]

    def keys_of(self, arguments: Mapping[str, Any]) -> list[str]:
        return [source.key_of(**arguments) for source in self.sources]


class FeatureReader:
    """Reads a function's online features. Owner: the event loop of an instance."""

    def __init__(self, spec: FeaturesSpec) -> None:
        self._sources = spec.online
        self._defaults = {
            one.name: one.default for source in spec.online for one in source.schema.features
        }
        groups: dict[tuple[str, float], list[RedisFeatures]] = defaultdict(list)
        for source in spec.online:
            groups[source.url, source.deadline_ms / 1000].append(source)
        self._groups = tuple(
            _Group(url=url, within_s=within_s, sources=tuple(sources))
            for (url, within_s), sources in groups.items()
        )
        self._clients: dict[str, RedisClient] = {}
        self._is_open = False

    def __repr__(self) -> str:
        return f"<FeatureReader {', '.join(source.key for source in self._sources)}>"

    def require_variables(self, names: Collection[str]) -> None:
        """Raise InvalidInput unless all addresses are among the environment variables `names`."""
        for source in self._sources:
            if source.url not in names:
                raise InvalidInput(
                    f"features: {source.key!r} is read from the Redis at {source.url}, which is no "
                    f"environment variable of this function: add a secret that sets it, or url=",
                    parameter="features",
                )

    def defaults(self) -> Features:
        """Return all defaults."""
        return Features(
            {
                name: value.copy() if type(value) is list else value
                for name, value in self._defaults.items()
            }
        )

    def open(self, environ: Mapping[str, str]) -> None:
        """Begin to connect: the process is an instance now. Call it in the event loop."""
        self._is_open = True
        for source in self._sources:
            if source.url in self._clients:
                continue
            try:
                address = RedisAddress.parse(environ.get(source.url, ""))
            except ValueError as e:
                print(f"features: {source.url}: {e}; calls get defaults", file=sys.stderr)
                continue
            client = self._clients[source.url] = RedisClient(address, name=source.url)
            client.connect()

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            client.close()

    async def read(self, arguments: Mapping[str, Any]) -> Features:
        """Return the features of a call with these arguments. Raises InvalidInput for an argument
        that makes no key, and nothing else."""
        keys = [group.keys_of(arguments) for group in self._groups]
        found = self.defaults()
        if not self._is_open:
            return found
        reads = [self._read(*one) for one in zip(self._groups, keys, strict=True)]
        values = [await reads[0]] if len(reads) == 1 else await asyncio.gather(*reads)
        now = time.time()
        for group, (read, reason) in zip(self._groups, values, strict=True):
            for source, value in zip(group.sources, read, strict=True):
                _fill(found, source, value, reason, now)
        return found

    @staticmethod
    def header_line(features: Features) -> bytes:
        """Return the header line, with CRLF, of a response whose features are degraded; b"" for
        others."""
        if not features.degraded:
            return b""
        worst = min(features.degraded.values(), key=REASONS.index)
        return f"{HEADER_DEGRADED}: {DEGRADED_FEATURES}{worst}\r\n".encode()

    async def _read(self, group: _Group, keys: Sequence[str]) -> tuple[Sequence[bytes | None], str]:
        """Return the values of keys, and why a value is missing."""
        client = self._clients.get(group.url)
        if client is None:
            return [None] * len(keys), "unavailable"
        try:
            return await client.mget(keys, within_s=group.within_s), "missing"
        except ReadFailed as e:
            return [None] * len(keys), e.reason


def _fill(
    found: Features, source: RedisFeatures, value: bytes | None, reason: str, now: float
) -> None:
    """Replace defaults by what was read; `reason`: why there is no value."""
    document: Any = None
    if value is not None:
        document, reason = _document(value, source, now)
    for one in source.schema.features:
        given = None if document is None else document.get(one.name)
        if given is None:
            if document is None or not one.nullable or one.name not in document:
                found.degraded[one.name] = reason
            else:
                found[one.name] = None
            continue
        try:
            found[one.name] = one.convert(given)
        except InvalidInput:
            found.degraded[one.name] = "invalid"


def _document(value: bytes, source: RedisFeatures, now: float) -> tuple[dict[str, Any] | None, str]:
    """Return a value as an object, and why a feature in it is missing; None for one that is not
    used."""
    try:
        document = json.loads(value)
    except (ValueError, RecursionError):
        return None, "invalid"
    if not isinstance(document, dict):
        return None, "invalid"
    if source.max_age_s is not None:
        at = _seconds(document.get(source.timestamp))
        if not now - source.max_age_s <= at <= now + MAX_AHEAD_S:
            return None, "stale"
    return document, "missing"


def _seconds(value: Any) -> float:
    """Return a time as seconds since the epoch; NaN for what is none."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    try:
        at = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return math.nan
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
