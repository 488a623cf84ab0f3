"""Client methods for service level objectives."""

from __future__ import annotations

from pilotlight.client.json_stream import Json
from pilotlight.client.resources.node import NodeResources
from pilotlight.client.transport import path_segment

_PATH = "/v1/slos"


class SloResources(NodeResources):
    """Methods of `pilotlight.client.client.Client` for service level objectives."""

    def slos(self, *, app: str | None = None, function: str | None = None) -> list[Json]:
        """List the functions of the environment by name, with the state of their objectives."""
        return self._list(_PATH, "slos", app=app, function=function)

    def slo(self, app: str, function: str) -> Json:
        """Return the indicators of a function with burn rates by window, its stages and its alerts.
        Raises NotFound."""
        return self._get(f"{_PATH}/{path_segment(app)}/{path_segment(function)}")
