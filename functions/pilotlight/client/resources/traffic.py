"""Client methods for traffic: which revisions answer which calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pilotlight.client.json_stream import Json, without_none
from pilotlight.client.resources.node import NodeResources
from pilotlight.client.transport import path_segment


class _Unchanged:
    """Default of an argument for which None has a meaning."""

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = _Unchanged()


class TrafficResources(NodeResources):
    """Methods of `pilotlight.client.client.Client` for traffic."""

    def traffic(self, app: str, function: str) -> Json:
        """Return the traffic of a function: weights, tags, aliases, unit, pins, bounds, shadow, and
        its `generation`. Raises NotFound."""
        return self._get(_path(app, function))

    def change_traffic(
        self,
        app: str,
        function: str,
        *,
        weights: Mapping[str, int] | None = None,
        tags: Mapping[str, str | None] | None = None,
        pins: Mapping[str, str | None] | None = None,
        sticky: str | None = None,
        max_candidate: int | None = None,
        shadow: Mapping[str, Any] | _Unchanged | None = UNCHANGED,
        generation: int | None = None,
        message: str | None = None,
        allow_breaking: bool = False,
        override_freeze: bool = False,
    ) -> Json:
        """Change the given parts of the traffic of a function, immediately and atomically.
        Revisions may be given by alias or tag.

        Args:
            tags: None as a value removes one.
            pins: None as a value removes one.
            shadow: `{"revision", "percent", "max_compute"}`; None removes it.
            generation: that of the traffic on which the change is based.
            allow_breaking: as for a deploy, for revisions that never had traffic. Requires scope
                admin.
            override_freeze: as for a deploy, for revisions that never had traffic. Requires scope
                admin.

        Raises Incompatible, GateFailed, ReleaseFrozen, InvalidInput and NotFound; Conflict if
        `generation` is not the newest."""
        body = without_none(
            {
                "weights": dict(weights) if weights is not None else None,
                "tags": dict(tags) if tags is not None else None,
                "pins": dict(pins) if pins is not None else None,
                "sticky": sticky,
                "max_candidate": max_candidate,
                "generation": generation,
                "message": message,
                "allow_breaking": allow_breaking or None,
                "override_freeze": override_freeze or None,
            }
        )
        if not isinstance(shadow, _Unchanged):
            body["shadow"] = dict(shadow) if shadow is not None else None
        return dict(self._transport.request("PATCH", _path(app, function), json=body).json())


def _path(app: str, function: str) -> str:
    return f"/v1/functions/{path_segment(app)}/{path_segment(function)}/traffic"
