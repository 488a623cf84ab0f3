"""Client methods for language models and their statistics."""

from __future__ import annotations

from pilotlight.client.json_stream import Json
from pilotlight.client.resources.node import NodeResources
from pilotlight.client.transport import path_segment

_PATH = "/v1/engines"


class EngineResources(NodeResources):
    """Methods of `pilotlight.client.client.Client` for language models."""

    def engines(self, *, app: str | None = None, function: str | None = None) -> list[Json]:
        """List the language models of the environment by name, with statistics of the last 24
        hours."""
        return self._list(_PATH, "engines", app=app, function=function)

    def engine(self, app: str, function: str) -> Json:
        """Return one language model. Raises NotFound."""
        return self._get(f"{_PATH}/{path_segment(app)}/{path_segment(function)}")
