"""Objectives, as typed methods of the client."""

from __future__ import annotations

from urllib.parse import quote

from pilotlight.client.json_stream import Json
from pilotlight.client.resources.node import NodeResources

_PATH = "/v1/slos"


class SloResources(NodeResources):
    """Part of `pilotlight.client.client.Client`, which owns the transport."""

    def slos(self, *, app: str | None = None, function: str | None = None) -> list[Json]:
        """How the functions of the environment stand against their objectives, by name."""
        return self._list(_PATH, "slos", app=app, function=function)

    def slo(self, app: str, function: str) -> Json:
        """One function: its indicators with burn rates by window, its stages, its alarms. Raises
        NotFound."""
        return self._get(f"{_PATH}/{quote(app, safe='')}/{quote(function, safe='')}")
