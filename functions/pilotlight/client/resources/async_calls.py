"""Client methods for asynchronous work: background calls, dead letters, schedules and webhooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pilotlight.client.json_stream import Json, without_none
from pilotlight.client.resources.node import NodeResources
from pilotlight.client.transport import path_segment
from pilotlight.protocol import CallRecord


class AsyncCallResources(NodeResources):
    """Methods of `pilotlight.client.client.Client` for background calls, schedules and webhooks."""

    # -- background calls --------------------------------------------------------------------------
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
        """List background calls, newest first, without results. State "DEAD" means failed after the
        last attempt. `before` selects the next page."""
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
        """Run a dead-lettered call again, under its id. Raises Conflict for other calls."""
        self._transport.request("POST", f"/v1/calls/{path_segment(call_id)}:redrive")

    def redrive_all(self, *, app: str | None = None, function: str | None = None) -> list[str]:
        """Run all dead-lettered calls of the environment, an app, or a function again, and return
        their ids."""
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
        """List the schedules of deployed functions, with their next run times."""
        return self._list("/v1/schedules", "schedules", app=app, function=function)

    def pause_schedule(self, app: str, function: str, number: int = 0) -> Json:
        """Pause a schedule until it is resumed. Deploys do not resume it."""
        return dict(
            self._transport.request(
                "POST", f"{_schedule(app, function, number)}:pause", repeatable=True
            ).json()
        )

    def resume_schedule(self, app: str, function: str, number: int = 0) -> Json:
        """Resume a schedule, from its next run time."""
        return dict(
            self._transport.request(
                "POST", f"{_schedule(app, function, number)}:resume", repeatable=True
            ).json()
        )

    def run_schedule(self, app: str, function: str, number: int = 0) -> str:
        """Start an extra call of a schedule immediately, and return the id of the call."""
        return str(
            self._transport.request("POST", f"{_schedule(app, function, number)}:run").json()["id"]
        )

    # -- named webhooks ----------------------------------------------------------------------------
    def webhooks(self) -> list[Json]:
        """List the webhooks of the environment."""
        return self._list("/v1/webhooks", "webhooks")

    def set_webhook(
        self, name: str, url: str, *, events: Sequence[str] = (), new_secret: bool = False
    ) -> Json:
        """Create or change a webhook. `events`: "call.finished", "rollout.*", "*", …; empty = only
        calls that name the webhook.

        `secret` in the response signs the messages. It is shown only once; None = unchanged."""
        body = {"url": url, "events": list(events), "new_secret": new_secret}
        return dict(self._transport.request("PUT", _webhook(name), json=body).json())

    def delete_webhook(self, name: str) -> None:
        """Delete a webhook. Pending deliveries are dropped."""
        self._transport.request("DELETE", _webhook(name))

    def test_webhook(self, name: str) -> Json:
        """Send a signed example once, and return the message and the outcome."""
        return dict(self._transport.request("POST", f"{_webhook(name)}:test").json())

    def deliveries(self, name: str, *, failed: bool | None = None, limit: int = 100) -> list[Json]:
        """List the deliveries of a webhook, newest first. `failed`: only those given up."""
        return self._list(f"{_webhook(name)}/deliveries", "deliveries", failed=failed, limit=limit)


def _schedule(app: str, function: str, number: int) -> str:
    return f"/v1/schedules/{path_segment(app)}/{path_segment(function)}/{number}"


def _webhook(name: str) -> str:
    return f"/v1/webhooks/{path_segment(name)}"
