"""What goes on without a caller, as typed methods of the client: submitted calls in lists, dead
letters, schedules, named webhooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from pilotlight.client.json_stream import Json, without_none
from pilotlight.client.resources.node import NodeResources
from pilotlight.protocol import CallRecord


class AsyncCallResources(NodeResources):
    """Part of `pilotlight.client.client.Client`, which owns the transport."""

    # -- submitted calls ---------------------------------------------------------------------------
    def calls(
        self,
        *,
        state: str | None = None,
        app: str | None = None,
        function: str | None = None,
        schedule: str | None = None,
        before: float | None = None,
        limit: int = 100,
    ) -> list[CallRecord]:
        """Submitted calls, newest first, without results. `state` "DEAD": failed after the last
        attempt. `before`: the next page."""
        params: dict[str, Any] = {
            "state": state,
            "app": app,
            "function": function,
            "schedule": schedule,
            "before": before,
        }
        return [
            CallRecord.from_json(call)
            for call in self._list("/v1/calls", "calls", **params, limit=limit)
        ]

    def redrive(self, call_id: str) -> None:
        """Send a dead letter again, under its id. Raises Conflict when it is none."""
        self._transport.request("POST", f"/v1/calls/{_quoted(call_id)}:redrive")

    def redrive_all(self, *, app: str | None = None, function: str | None = None) -> list[str]:
        """Send all dead letters of the environment, of an app, or of a function again; their
        ids."""
        sent: list[str] = []
        while True:
            body = self._transport.request(
                "POST", "/v1/calls:redrive", json=without_none({"app": app, "function": function})
            ).json()
            sent += body["calls"]
            if not body["more"]:
                return sent

    # -- schedules ---------------------------------------------------------------------------------
    def schedules(self, *, app: str | None = None, function: str | None = None) -> list[Json]:
        """Schedules of deployed functions, with their next times."""
        return self._list("/v1/schedules", "schedules", app=app, function=function)

    def pause_schedule(self, app: str, function: str, number: int = 0) -> Json:
        """Call no more until it is resumed, whatever is deployed meanwhile."""
        return dict(
            self._transport.request(
                "POST", f"{_schedule(app, function, number)}:pause", repeatable=True
            ).json()
        )

    def resume_schedule(self, app: str, function: str, number: int = 0) -> Json:
        """Go on with the next time."""
        return dict(
            self._transport.request(
                "POST", f"{_schedule(app, function, number)}:resume", repeatable=True
            ).json()
        )

    def run_schedule(self, app: str, function: str, number: int = 0) -> str:
        """Make its call at once, beside the plan; the call's id."""
        return str(
            self._transport.request("POST", f"{_schedule(app, function, number)}:run").json()["id"]
        )

    # -- named webhooks ----------------------------------------------------------------------------
    def webhooks(self) -> list[Json]:
        """The environment's webhooks."""
        return self._list("/v1/webhooks", "webhooks")

    def set_webhook(
        self, name: str, url: str, *, events: Sequence[str] = (), new_secret: bool = False
    ) -> Json:
        """Make or change a webhook. `events`: "call.finished", "rollout.*", "*", …; none = only the
        calls that name it.

        `secret` in the answer signs its messages; it is shown this one time, None = it is as it
        was."""
        body = {"url": url, "events": list(events), "new_secret": new_secret}
        return dict(self._transport.request("PUT", _webhook(name), json=body).json())

    def delete_webhook(self, name: str) -> None:
        """Remove a webhook; what it was not told yet it is not told any more."""
        self._transport.request("DELETE", _webhook(name))

    def test_webhook(self, name: str) -> Json:
        """Post a signed example, once; what was sent and what became of it."""
        return dict(self._transport.request("POST", f"{_webhook(name)}:test").json())

    def deliveries(self, name: str, *, failed: bool | None = None, limit: int = 100) -> list[Json]:
        """What a webhook was told or could not be, newest first. `failed`: only what was given
        up."""
        return self._list(f"{_webhook(name)}/deliveries", "deliveries", failed=failed, limit=limit)


def _quoted(name: str) -> str:
    return quote(name, safe="")


def _schedule(app: str, function: str, number: int) -> str:
    return f"/v1/schedules/{_quoted(app)}/{_quoted(function)}/{number}"


def _webhook(name: str) -> str:
    return f"/v1/webhooks/{_quoted(name)}"
