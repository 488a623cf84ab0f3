"""What runs on the node and lies on its disk, as typed methods of the client: instances, Templates,
snapshots, logs.

And what all of the client's methods read answers with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pilotlight.client.json_stream import Json, iter_json_objects, without_none
from pilotlight.client.transport import Transport

if TYPE_CHECKING:
    pass


class NodeResources:
    """Part of `pilotlight.client.client.Client`, which owns the transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    # -- instances and logs ------------------------------------------------------------------------
    def instances(self, *, app: str | None = None) -> list[Json]:
        """Live instances of this tenant."""
        return self._list("/v1/instances", "instances", app=app)

    def stop_instance(self, instance: str) -> None:
        """Drain and stop one instance."""
        self._transport.request("POST", f"/v1/instances/{_quoted(instance)}:stop", repeatable=True)

    def exec_instance(self, instance: str, argv: Sequence[str]) -> Iterator[Json]:
        """Run a command beside an instance: `{"stream", "text"}` while it runs, `{"exit_status"}`
        last."""
        with self._transport.stream(
            "POST", f"/v1/instances/{_quoted(instance)}:exec", json={"argv": list(argv)}
        ) as response:
            yield from iter_json_objects(response)

    def logs(
        self,
        *,
        app: str | None = None,
        function: str | None = None,
        instance: str | None = None,
        call: str | None = None,
        since: float | None = None,
        tail: int | None = None,
        follow: bool = False,
    ) -> Iterator[Json]:
        """Log lines `{"time", "instance", "stream", "call", "text"}`, oldest first. Raises NotFound
        for a name that never was.

        `since` is wall-clock seconds; with `follow` it does not end.
        """
        wanted = {
            "app": app,
            "function": function,
            "instance": instance,
            "call": call,
            "since": since,
            "tail": tail,
        }
        params = {**without_none(wanted), **({"follow": "true"} if follow else {})}
        with self._transport.stream("GET", "/v1/logs", params=params) as response:
            yield from iter_json_objects(response)

    # -- Templates and snapshots -------------------------------------------------------------------
    def templates(self) -> list[Json]:
        """Resident Templates of this tenant."""
        return self._list("/v1/templates", "templates")

    def drop_template(self, revision: str) -> None:
        """Give up the memory of a Template; `revision` is its whole key. Raises NotFound."""
        self._transport.request("DELETE", f"/v1/templates/{_quoted(revision)}")

    def snapshots(self, *, app: str | None = None, function: str | None = None) -> list[Json]:
        """Snapshots on the node, older revisions' too."""
        return self._list("/v1/snapshots", "snapshots", app=app, function=function)

    def nodes(self) -> list[Json]:
        """The cluster's nodes as they last reported; for the platform's operator. Raises
        Forbidden."""
        return self._list("/v1/nodes", "nodes")

    def snapshot(self, snapshot: str) -> Json:
        """One snapshot. Raises NotFound."""
        return self._get(f"/v1/snapshots/{_quoted(snapshot)}")

    def prove_snapshot(self, snapshot: str) -> Json:
        """Restore it once and have it answer its example; as it is after that."""
        return dict(
            self._transport.request(
                "POST", f"/v1/snapshots/{_quoted(snapshot)}:prove", repeatable=True
            ).json()
        )

    def delete_snapshot(self, snapshot: str) -> int:
        """Remove one; how many went."""
        return int(
            self._transport.request("DELETE", f"/v1/snapshots/{_quoted(snapshot)}").json()[
                "deleted"
            ]
        )

    def delete_snapshots(self, app: str, function: str) -> int:
        """Remove those of all revisions of a function; how many went."""
        return int(self._transport.request("DELETE", _switch_path(app, function)).json()["deleted"])

    def switch_snapshots(self, app: str, function: str, *, enabled: bool) -> Json:
        """Allow or forbid snapshots of a function: `{"enabled", "deleted", …}`. It outlives
        deploys."""
        return dict(
            self._transport.request(
                "PUT", _switch_path(app, function), json={"enabled": enabled}
            ).json()
        )

    # -- answers -----------------------------------------------------------------------------------
    def _get(self, path: str, **params: Any) -> Json:
        return dict(self._transport.request("GET", path, params=without_none(params)).json())

    def _list(self, path: str, key: str, **params: Any) -> list[Json]:
        body = self._transport.request("GET", path, params=without_none(params)).json()
        return list(body[key])


def _quoted(name: str) -> str:
    return quote(name, safe="")


def _switch_path(app: str, function: str) -> str:
    return f"/v1/functions/{_quoted(app)}/{_quoted(function)}/snapshots"
