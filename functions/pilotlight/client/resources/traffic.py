"""Who is answered by which revision, as typed methods of the client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from pilotlight.client.json_stream import Json, without_none
from pilotlight.client.resources.node import NodeResources


class _Unchanged:
    """Stands for what is not given, where None means something."""

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = _Unchanged()


class TrafficResources(NodeResources):
    """Part of `pilotlight.client.client.Client`, which owns the transport."""

    def traffic(self, app: str, function: str) -> Json:
        """A function's traffic: weights, tags, aliases, unit, pins, bounds, shadow, and the
        `generation` of all that. Raises NotFound."""
        return self._get(_path(app, function))

    def put_traffic(self, app: str, function: str, document: Mapping[str, Any]) -> Json:
        """Let a function's traffic be so. Raises Conflict when the `generation` that it names, the
        one that was seen, is not the newest."""
        answer: Json = self._transport.request(
            "PUT", _path(app, function), json=dict(document)
        ).json()
        return answer

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
        """Change what is given, at once; the rest stays. A revision may be named by an alias or a
        tag.

        `tags`, `pins`: None as a value takes one away. `shadow`: `{"revision", "percent",
        "max_compute"}`, None takes it away. `generation`: of the traffic that the change was made
        for. `allow_breaking`, `override_freeze` (scope admin): as of a deploy, for revisions that
        never had traffic. Raises Incompatible, GateFailed, ReleaseFrozen; Conflict when it is
        another generation by now, InvalidInput, NotFound."""
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
        answer: Json = self._transport.request("PATCH", _path(app, function), json=body).json()
        return answer


def _path(app: str, function: str) -> str:
    return f"/v1/functions/{quote(app, safe='')}/{quote(function, safe='')}/traffic"
