"""Client methods for traffic (which revisions answer which calls), and for the rollouts that move
it step by step."""

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
_ROLLOUTS: Final = "/v1/rollouts"


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


class RolloutResources(NodeResources):
    """Methods of `pilotlight.client.client.Client` for rollouts."""

    def rollouts(
        self,
        *,
        app: str | None = None,
        function: str | None = None,
        state: str | None = None,
        limit: int | None = None,
    ) -> list[Json]:
        """List the rollouts of the environment, newest first. `state`: `active`, or a state."""
        return self._list(
            _ROLLOUTS, "rollouts", app=app, function=function, state=state, limit=limit
        )

    def rollout(self, rollout: str, *, limit: int | None = None) -> Json:
        """Return a rollout: its plan, the decision that would be made `now`, and up to `limit`
        decisions, newest first. Raises NotFound."""
        return self._get(_rollout_path(rollout), limit=limit)

    def pause_rollout(self, rollout: str) -> Json:
        """Hold a rollout at its step; failed gates still abort it. Raises Conflict if it has
        ended."""
        return self._act(rollout, "pause")

    def resume_rollout(self, rollout: str) -> Json:
        """Resume a paused rollout. Raises Conflict if it has ended."""
        return self._act(rollout, "resume")

    def promote_rollout(self, rollout: str) -> Json:
        """Move all traffic to the candidate now, regardless of its gates. Raises Conflict if the
        rollout has ended."""
        return self._act(rollout, "promote")

    def abort_rollout(self, rollout: str) -> Json:
        """Move all traffic back to stable now. Raises Conflict if the rollout has ended."""
        return self._act(rollout, "abort")

    def _act(self, rollout: str, verb: str) -> Json:
        return dict(self._transport.request("POST", f"{_rollout_path(rollout)}:{verb}").json())


def _path(app: str, function: str) -> str:
    return f"/v1/functions/{path_segment(app)}/{path_segment(function)}/traffic"


def _rollout_path(rollout: str) -> str:
    return f"{_ROLLOUTS}/{path_segment(rollout)}"
