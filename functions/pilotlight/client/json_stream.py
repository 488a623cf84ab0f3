"""JSON values of a streamed (NDJSON) response."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pilotlight.client.errors import error_from_problem
from pilotlight.errors import PilotlightError

if TYPE_CHECKING:
    import httpx

Json = dict[str, Any]


def iter_json_lines(response: httpx.Response) -> Iterator[Any]:
    """The JSON values of an NDJSON answer, as they come."""
    for line in response.iter_lines():
        if line.strip():
            yield json.loads(line)


def iter_json_objects(response: httpx.Response) -> Iterator[Json]:
    """The same where each is an object; `{"error": problem}` is raised."""
    for part in iter_json_lines(response):
        if (
            isinstance(part, dict)
            and isinstance(part.get("error"), dict)
            and set(part) == {"error"}
        ):
            raise error_from_problem(part["error"])
        if not isinstance(part, dict):
            raise PilotlightError(f"the platform streamed {part!r} where an object was expected")
        yield part


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are not None."""
    return {key: value for key, value in values.items() if value is not None}
