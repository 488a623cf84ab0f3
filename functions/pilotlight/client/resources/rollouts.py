"""Rollouts, as typed methods of the client."""

from __future__ import annotations

from urllib.parse import quote

from pilotlight.client.json_stream import Json
from pilotlight.client.resources.node import NodeResources

_PATH = "/v1/rollouts"


class RolloutResources(NodeResources):
    """Part of `pilotlight.client.client.Client`, which owns the transport."""

    def rollouts(
        self,
        *,
        app: str | None = None,
        function: str | None = None,
        state: str | None = None,
        limit: int | None = None,
    ) -> list[Json]:
        """Rollouts of the environment, newest first. `state`: `active`, or one of its states."""
        return self._list(_PATH, "rollouts", app=app, function=function, state=state, limit=limit)

    def rollout(self, rollout: str, *, limit: int | None = None) -> Json:
        """One rollout: its plan, what would be decided `now`, and up to `limit` decisions, newest
        first. Raises NotFound."""
        return self._get(_of(rollout), limit=limit)

    def pause_rollout(self, rollout: str) -> Json:
        """Keep it at its step; what is bad still takes it back. Raises Conflict when it is over."""
        return self._act(rollout, "pause")

    def resume_rollout(self, rollout: str) -> Json:
        """Let a paused one go on. Raises Conflict when it is over."""
        return self._act(rollout, "resume")

    def promote_rollout(self, rollout: str) -> Json:
        """All traffic to the candidate now, whatever its gates say. Raises Conflict when it is
        over."""
        return self._act(rollout, "promote")

    def abort_rollout(self, rollout: str) -> Json:
        """All traffic back to stable now. Raises Conflict when it is over."""
        return self._act(rollout, "abort")

    def _act(self, rollout: str, verb: str) -> Json:
        return dict(self._transport.request("POST", f"{_of(rollout)}:{verb}").json())


def _of(rollout: str) -> str:
    return f"{_PATH}/{quote(rollout, safe='')}"
