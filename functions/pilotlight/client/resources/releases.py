"""Client methods for releases: apps, deploys, revisions, approvals, rollbacks and aliases."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypedDict

from pilotlight.client.json_stream import Json, without_none
from pilotlight.client.resources.node import NodeResources
from pilotlight.client.transport import path_segment
from pilotlight.errors import InvalidInput
from pilotlight.protocol import HEADER_IDEMPOTENCY_KEY
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.record_json import to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedFunction:
    """One function of a deployment: its new or unchanged revision, and the stage of its release.

    Attributes:
        stage: `live`; `waiting` for `approvals` more approvals; `no_traffic`, as requested; or
            `rollout`, whose id is in `rollout`."""

    function: str
    revision: str
    created: bool
    stage: str = "live"
    approvals: int = 0
    rollout: str = ""

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Parse a part of the response of the controller."""
        return cls(
            function=str(body["function"]),
            revision=str(body["revision"]),
            created=bool(body["created"]),
            stage=str(body.get("stage") or "live"),
            approvals=int(body.get("approvals") or 0),
            rollout=str(body.get("rollout") or ""),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The result of a deploy. `version` counts the entries in the history of the app from 1."""

    app: str
    environment: str
    version: int
    functions: tuple[DeployedFunction, ...]

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Parse the response of the controller."""
        functions = tuple(DeployedFunction.from_json(f) for f in body["functions"])
        return cls(
            app=str(body["app"]),
            environment=str(body["environment"]),
            version=int(body["version"]),
            functions=functions,
        )


class ReleaseOptions(TypedDict, total=False):
    """Options for the release of a deploy: keywords of `ReleaseResources.deploy`."""

    meta: Mapping[str, str]
    evaluation: Mapping[str, float]
    rollout: Mapping[str, Any] | None
    no_traffic: bool
    tag: str | None
    allow_breaking: bool
    override_freeze: bool
    lease_s: float | None
    keep_others: bool


class ReleaseResources(NodeResources):
    """Methods of `pilotlight.client.client.Client` for releases.

    `function` None means the only function of the app. A revision is given by its name, such as
    `v6`, or by an alias or tag."""

    # -- apps --------------------------------------------------------------------------------------
    def deploy(
        self,
        app: str,
        functions: Sequence[FunctionSpec],
        *,
        message: str = "",
        labels: Mapping[str, str] | None = None,
        meta: Mapping[str, str] | None = None,
        evaluation: Mapping[str, float] | None = None,
        rollout: Mapping[str, Any] | None = None,
        no_traffic: bool = False,
        tag: str | None = None,
        allow_breaking: bool = False,
        override_freeze: bool = False,
        lease_s: float | None = None,
        keep_others: bool = False,
    ) -> Deployment:
        """Replace the functions of an app. Deploying identical specs creates no revision.

        Args:
            meta: lineage of the new revisions.
            evaluation: metrics of their offline evaluation.
            rollout: release step by step, such as {"steps": [5, 100]}.
            no_traffic: leave the traffic unchanged.
            tag: tag by which the new revisions can be called.
            lease_s: delete the app after this time unless `renew_app` is called; None: keep it.
            keep_others: add these functions to the app instead, which keeps its other ones.

        Raises Incompatible, GateFailed, ReleaseFrozen; nothing has changed then."""
        described = {
            "message": message,
            "labels": dict(labels or {}),
            "meta": dict(meta or {}),
            "evaluation": dict(evaluation or {}),
        }
        switches = {
            "no_traffic": no_traffic,
            "allow_breaking": allow_breaking,
            "override_freeze": override_freeze,
            "keep_others": keep_others,
        }
        wanted = {name: value for name, value in switches.items() if value}
        body = {
            "functions": [to_json(f) for f in functions],
            **described,
            **wanted,
            **without_none({"rollout": rollout, "tag": tag, "lease_s": lease_s}),
        }
        return Deployment.from_json(
            self._transport.request(
                "POST", f"{_app_path(app)}/deploy", json=body, repeatable=True
            ).json()
        )

    def apps(self) -> list[Json]:
        """List the apps of the environment."""
        return self._list("/v1/apps", "apps")

    def app(self, app: str) -> Json:
        """Return an app: its functions, revisions and traffic."""
        return self._get(_app_path(app))

    def history(self, app: str, *, limit: int | None = None) -> list[Json]:
        """List the changes of an app, newest first."""
        return self._list(f"{_app_path(app)}/history", "history", limit=limit)

    def stop_app(self, app: str) -> None:
        """Stop the instances of an app and reject its calls until it is deployed again."""
        self._transport.request("POST", f"{_app_path(app)}:stop", repeatable=True)

    def delete_app(self, app: str) -> None:
        """Delete an app. Its usage records are kept."""
        self._transport.request("DELETE", _app_path(app))

    def renew_app(self, app: str) -> float:
        """Extend the lease of an app that was deployed with `lease_s`; return when it ends (seconds
        since the epoch). Raises NotFound, Conflict."""
        body = self._transport.request("POST", f"{_app_path(app)}:renew", repeatable=True).json()
        return float(body["expires_at"])

    def protect_app(self, app: str, *, approvals: int) -> Json:
        """Set how many approvals new revisions of the app need before they get traffic; 0 = none.
        Requires scope admin."""
        return self._send("PUT", f"{_app_path(app)}/policy", {"approvals": approvals})

    def promote_app(
        self, app: str, *, from_environment: str, to_environment: str, **options: Any
    ) -> Deployment:
        """Deploy the specs that serve in one environment to another. `options`: function, message,
        rollout, allow_breaking."""
        body = {
            "from_environment": from_environment,
            "to_environment": to_environment,
            **without_none(options),
        }
        return Deployment.from_json(self._send("POST", f"{_app_path(app)}:promote", body))

    # -- revisions ---------------------------------------------------------------------------------
    def revisions(self, app: str, *, function: str | None = None) -> list[Json]:
        """List the revisions of a function, newest first."""
        return self._list(f"{self._function(app, function)}/revisions", "revisions")

    def revision(self, app: str, revision: str, *, function: str | None = None) -> Json:
        """Return the manifest of a revision: everything that it pins, and its metadata. Raises
        NotFound."""
        return self._get(f"{self._function(app, function)}/revisions/{path_segment(revision)}")

    def diff(self, app: str, before: str, after: str, *, function: str | None = None) -> Json:
        """Compare two revisions: `{"changes": [{"what", "from", "to"}], "breaks": […]}`."""
        return self._get(
            f"{self._function(app, function)}/revisions:diff", **{"from": before, "to": after}
        )

    def promote(
        self,
        app: str,
        revision: str,
        *,
        function: str | None = None,
        message: str = "",
        rollout: Mapping[str, Any] | None = None,
        evaluation: Mapping[str, float] | None = None,
        allow_breaking: bool = False,
        override_freeze: bool = False,
    ) -> Json:
        """Release a revision, immediately or by `rollout`. Raises ApprovalRequired, Incompatible,
        GateFailed, ReleaseFrozen."""
        switches = {"allow_breaking": allow_breaking, "override_freeze": override_freeze}
        body = {
            "revision": revision,
            "message": message,
            **switches,
            **without_none({"rollout": rollout, "evaluation": evaluation}),
        }
        return self._send("POST", f"{self._function(app, function)}:promote", body)

    def rollback(
        self, app: str, *, function: str | None = None, to: str | None = None, message: str = ""
    ) -> Json:
        """Move all traffic to the revision `to` immediately; None: the one that served before. Ends
        a rollout and an experiment of the function."""
        return self._send(
            "POST",
            f"{self._function(app, function)}:rollback",
            {"message": message, **without_none({"to": to})},
        )

    def rollback_app(self, app: str, *, message: str = "") -> list[Json]:
        """Move all traffic of each function to the revision that served before, or of none: then
        raises Conflict."""
        body = self._send("POST", f"{_app_path(app)}:rollback", {"message": message})
        return list(body["functions"])

    def pin(
        self, app: str, tenant: str, revision: str | None, *, function: str | None = None
    ) -> Json:
        """Direct the calls of a tenant to a revision, regardless of weights; None removes the
        pin."""
        return self._send(
            "POST", f"{self._function(app, function)}:pin", {"tenant": tenant, "revision": revision}
        )

    def approve(
        self, app: str, revision: str, *, function: str | None = None, note: str = ""
    ) -> Json:
        """Approve a revision; returns `{"missing": n}`, how many approvals it still needs. Raises
        Conflict if this client deployed it."""
        path = f"{self._function(app, function)}/revisions/{path_segment(revision)}:approve"
        return self._send("POST", path, {"note": note})

    def prune_app(self, app: str, *, keep: int = 10, dry_run: bool = False) -> Json:
        """Delete old revisions of an app: all but the newest `keep` of each function and those that
        can be called."""
        body = {"keep": keep, "dry_run": dry_run}
        path = f"{_app_path(app)}:prune"
        return dict(self._transport.request("POST", path, json=body).json())

    # -- aliases -----------------------------------------------------------------------------------
    def aliases(self, app: str, *, function: str | None = None) -> dict[str, str]:
        """Return the aliases of a function, name → revision. The platform maintains `stable` and
        `candidate`."""
        return dict(self._get(f"{self._function(app, function)}/aliases")["aliases"])

    def set_alias(
        self, app: str, alias: str, revision: str, *, function: str | None = None
    ) -> dict[str, str]:
        """Set an alias of a revision, and return all aliases."""
        path = f"{self._function(app, function)}/aliases/{path_segment(alias)}"
        return dict(self._send("PUT", path, {"revision": revision})["aliases"])

    def delete_alias(self, app: str, alias: str, *, function: str | None = None) -> None:
        """Delete an alias. Raises NotFound."""
        self._transport.request(
            "DELETE", f"{self._function(app, function)}/aliases/{path_segment(alias)}"
        )

    def _send(self, method: str, path: str, body: Mapping[str, Any]) -> Json:
        # The key makes a retry the same change: two rollbacks would go back two steps.
        key = {HEADER_IDEMPOTENCY_KEY: secrets.token_hex(16)}
        return dict(
            self._transport.request(method, path, json=body, headers=key, repeatable=True).json()
        )

    def _function(self, app: str, function: str | None) -> str:
        if function is None:
            names = [str(one["name"]) for one in self.app(app)["functions"]]
            if len(names) != 1:
                hint = f"Specify one: {app}/{names[0]}" if names else "Deploy it first."
                raise InvalidInput(
                    f"{app} has {len(names)} functions: {', '.join(names) or 'none'}", hint=hint
                )
            function = names[0]
        return f"{_app_path(app)}/functions/{path_segment(function)}"


def _app_path(app: str) -> str:
    return f"/v1/apps/{path_segment(app)}"
