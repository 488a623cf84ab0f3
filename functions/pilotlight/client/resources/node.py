"""Client methods for nodes: instances, logs, templates and snapshots. Also the base class of all
resources, with helpers to read responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pilotlight.client.json_stream import Json, iter_json_objects, without_none
from pilotlight.client.transport import Transport, path_segment


class NodeResources:
    """Methods of `pilotlight.client.client.Client` for nodes, and the base of all resources."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    # -- instances and logs ------------------------------------------------------------------------
    def instances(self, *, app: str | None = None) -> list[Json]:
        """List the running instances of this tenant."""
        return self._list("/v1/instances", "instances", app=app)

    def stop_instance(self, instance: str) -> None:
        """Drain and stop one instance."""
        self._transport.request(
            "POST", f"/v1/instances/{path_segment(instance)}:stop", repeatable=True
        )

    def exec_instance(self, instance: str, argv: Sequence[str]) -> Iterator[Json]:
        """Run a command next to an instance: yields `{"stream", "text"}` while it runs,
        `{"exit_status"}` last."""
        with self._transport.stream(
            "POST", f"/v1/instances/{path_segment(instance)}:exec", json={"argv": list(argv)}
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
        """Yield log lines `{"time", "instance", "stream", "call", "text"}`, oldest first.

        `since` is wall-clock seconds; with `follow` the stream does not end. Raises NotFound for an
        unknown name."""
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
        """List the resident templates of this tenant."""
        return self._list("/v1/templates", "templates")

    def drop_template(self, revision: str) -> None:
        """Free the memory of a template; `revision` is its full key. Raises NotFound."""
        self._transport.request("DELETE", f"/v1/templates/{path_segment(revision)}")

    def snapshots(self, *, app: str | None = None, function: str | None = None) -> list[Json]:
        """List the snapshots on the node, or the nodes of a cluster, including those of older
        revisions."""
        return self._list("/v1/snapshots", "snapshots", app=app, function=function)

    def nodes(self) -> list[Json]:
        """List the nodes of the cluster with their last reports. For platform administrators;
        raises Forbidden."""
        return self._list("/v1/nodes", "nodes")

    def machine(self) -> Json:
        """Return the features of the machine, or cluster, and what it has: `{"features",
        "node"}`."""
        return self._get("/v1/node")

    def cluster(self) -> Json:
        """Return whose objects are in the cluster. For operators; raises Forbidden."""
        return self._get("/v1/cluster")

    def adopt_cluster(self, platform: str) -> Json:
        """Take over the objects of another platform in the cluster. For operators; raises
        Forbidden, InvalidInput."""
        body = {"platform": platform}
        return dict(
            self._transport.request("POST", "/v1/cluster:adopt", json=body, repeatable=True).json()
        )

    def snapshot(self, snapshot: str) -> Json:
        """Return a snapshot. Raises NotFound."""
        return self._get(f"/v1/snapshots/{path_segment(snapshot)}")

    def prove_snapshot(self, snapshot: str) -> Json:
        """Verify a snapshot by restoring it once and calling its example; returns its new state."""
        return dict(
            self._transport.request(
                "POST", f"/v1/snapshots/{path_segment(snapshot)}:prove", repeatable=True
            ).json()
        )

    def quarantine_snapshot(self, snapshot: str, *, reason: str) -> Json:
        """Quarantine a snapshot: it is never restored again. Returns its new state."""
        path = f"/v1/snapshots/{path_segment(snapshot)}:quarantine"
        body = {"reason": reason}
        return dict(self._transport.request("POST", path, json=body, repeatable=True).json())

    def delete_snapshot(self, snapshot: str) -> int:
        """Delete a snapshot and return the number of deleted ones."""
        return int(
            self._transport.request("DELETE", f"/v1/snapshots/{path_segment(snapshot)}").json()[
                "deleted"
            ]
        )

    def delete_snapshots(self, app: str, function: str) -> int:
        """Delete the snapshots of all revisions of a function and return their number."""
        return int(self._transport.request("DELETE", _switch_path(app, function)).json()["deleted"])

    def switch_snapshots(self, app: str, function: str, *, enabled: bool) -> Json:
        """Allow or forbid snapshots of a function, also for later deploys; returns `{"enabled",
        "deleted", …}`."""
        return dict(
            self._transport.request(
                "PUT", _switch_path(app, function), json={"enabled": enabled}
            ).json()
        )

    # -- responses ---------------------------------------------------------------------------------
    def _get(self, path: str, **params: Any) -> Json:
        return dict(self._transport.request("GET", path, params=without_none(params)).json())

    def _list(self, path: str, key: str, **params: Any) -> list[Json]:
        body = self._transport.request("GET", path, params=without_none(params)).json()
        return list(body[key])


def _switch_path(app: str, function: str) -> str:
    return f"/v1/functions/{path_segment(app)}/{path_segment(function)}/snapshots"
