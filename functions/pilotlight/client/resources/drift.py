"""Client methods for drift and quality of monitored functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pilotlight.client.json_stream import Json, without_none
from pilotlight.client.resources.node import NodeResources
from pilotlight.client.transport import path_segment


class DriftResources(NodeResources):
    """Methods of `pilotlight.client.client.Client` for drift."""

    def drift_list(self) -> list[Json]:
        """List the monitored functions of the environment with their last windows."""
        return self._list("/v1/drift", "functions")

    def drift(
        self,
        app: str,
        function: str,
        *,
        limit: int = 10,
        revision: str | None = None,
        against: str | None = None,
    ) -> Json:
        """Return the windows of a monitored function, and the difference of two revisions if they
        are named. Raises NotFound for a function without `monitor=`."""
        params = without_none({"limit": limit, "revision": revision, "against": against})
        response = self._transport.request("GET", _path(app, function), params=params)
        return dict(response.json())

    def set_drift_baseline(
        self,
        app: str,
        function: str,
        *,
        since: str | None = None,
        until: str | None = None,
        rows: int = 0,
        features: Mapping[str, Any] | None = None,
    ) -> Json:
        """Store what windows are compared with: a time of the log, or counts of other rows. Raises
        InvalidInput for too few rows."""
        body = without_none({"since": since, "until": until})
        if features:
            body |= {"rows": rows, "features": dict(features)}
        path = f"{_path(app, function)}/baseline"
        return dict(self._transport.request("PUT", path, json=body).json())


def _path(app: str, function: str) -> str:
    return f"/v1/apps/{path_segment(app)}/functions/{path_segment(function)}/drift"
