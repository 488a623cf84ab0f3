"""Language models and what they did, as typed methods of the client."""

from __future__ import annotations

from urllib.parse import quote

from pilotlight.client.json_stream import Json
from pilotlight.client.resources.node import NodeResources

_PATH = "/v1/engines"


class EngineResources(NodeResources):
    """Part of `pilotlight.client.client.Client`, which owns the transport."""

    def engines(self, *, app: str | None = None, function: str | None = None) -> list[Json]:
        """The language models of the environment, and what they did in the last 24 hours, by
        name."""
        return self._list(_PATH, "engines", app=app, function=function)

    def engine(self, app: str, function: str) -> Json:
        """One of them. Raises NotFound."""
        return self._get(f"{_PATH}/{quote(app, safe='')}/{quote(function, safe='')}")
