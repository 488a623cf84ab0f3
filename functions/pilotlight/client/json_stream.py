"""Parsing of streamed NDJSON responses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pilotlight.client.errors import error_from_problem
from pilotlight.errors import PilotlightError

if TYPE_CHECKING:
    import httpx

Json = dict[str, Any]


def iter_json_lines(response: httpx.Response) -> Iterator[Any]:
    """Yield the JSON values of an NDJSON response as they arrive."""
    for line in response.iter_lines():
        if line.strip():
            yield json.loads(line)


def iter_json_objects(response: httpx.Response) -> Iterator[Json]:
    """Yield the JSON objects of an NDJSON response as they arrive. Raises the exception of an
    `{"error": problem}`."""
    for part in iter_json_lines(response):
        yield _object(part)


async def iter_json_objects_async(pieces: AsyncIterator[bytes]) -> AsyncIterator[Json]:
    """Asynchronous form of `iter_json_objects`, for the pieces of a body."""
    held = b""
    async for piece in pieces:
        *lines, held = (held + piece).split(b"\n")
        for line in lines:
            if line.strip():
                yield _object(json.loads(line))


def _object(part: Any) -> Json:
    if isinstance(part, dict) and isinstance(part.get("error"), dict) and set(part) == {"error"}:
        raise error_from_problem(part["error"])
    if not isinstance(part, dict):
        raise PilotlightError(f"the platform streamed {part!r}, expected an object")
    return part


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries whose value is not None."""
    return {key: value for key, value in values.items() if value is not None}
