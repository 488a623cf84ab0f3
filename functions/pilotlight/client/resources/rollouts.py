"""Client methods for rollouts."""

from __future__ import annotations

from pilotlight.client.json_stream import Json
from pilotlight.client.resources.node import NodeResources
from pilotlight.client.transport import path_segment

_PATH = "/v1/rollouts"


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
        return self._list(_PATH, "rollouts", app=app, function=function, state=state, limit=limit)

    def rollout(self, rollout: str, *, limit: int | None = None) -> Json:
        """Return a rollout: its plan, the decision that would be made `now`, and up to `limit`
        decisions, newest first. Raises NotFound."""
        return self._get(_of(rollout), limit=limit)

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
        return dict(self._transport.request("POST", f"{_of(rollout)}:{verb}").json())


def _of(rollout: str) -> str:
    return f"{_PATH}/{path_segment(rollout)}"
