"""Routes for revisions of a function: list, compare, approve, promote, roll back, pin and alias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import Depends, Path, Query, Response
from pydantic import Field

from pilotlight.controller.api.schemas import Body, Meta, Numbers
from pilotlight.controller.context import (
    REQUIRE_DISK_SPACE,
    Admin,
    Ctx,
    Deployer,
    RequestId,
    app_ref_of,
)
from pilotlight.controller.database.store import Write
from pilotlight.controller.deployments import app_rollback, releases
from pilotlight.controller.deployments.releases import ReleaseOptions, ReleaseResult
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.registry.revisions import RevisionMetadata
from pilotlight.controller.release import (
    aliases,
    approvals,
    release_gates,
    revision_manifests,
    traffic,
)
from pilotlight.controller.rollouts import plan
from pilotlight.spec.identifiers import Scope
from pilotlight.spec.traffic import TrafficDocument

router = APIRouter(prefix="/v1/apps", tags=["releases"])
AppName = Annotated[str, Path(max_length=63)]
FunctionName = Annotated[str, Path(max_length=63)]
RevisionName = Annotated[str, Path(max_length=128, description="its name, `v6`, an alias or a tag")]
Message = Annotated[str, Field(max_length=2000)]
Reference = Annotated[str, Field(min_length=1, max_length=128)]


@dataclass(frozen=True, slots=True, kw_only=True)
class At:
    """The function that a request refers to, and the caller."""

    place: AppRef
    function: str
    caller: Principal


def _at(caller: Deployer, request: RequestId, app: AppName, function: FunctionName) -> At:
    caller.require_function(app, function)
    return At(place=app_ref_of(caller, app, request), function=function, caller=caller)


Here = Annotated[At, Depends(_at)]


class RevisionList(Body):
    """Revisions, newest first."""

    revisions: list[dict[str, Any]]


class PromoteRequest(Body):
    """A revision to serve, at once or step by step."""

    revision: Reference
    message: Message = ""
    rollout: dict[str, Any] | None = None
    meta: Meta = Field(default_factory=dict, max_length=64)
    evaluation: Numbers = Field(default_factory=dict, max_length=256)
    allow_breaking: bool = False
    override_freeze: bool = Field(default=False, description="requires a key with scope admin")


class Promoted(Body):
    """The result of a promotion."""

    app: str
    function: str
    revision: str
    stage: Literal["live", "waiting", "no_traffic", "rollout"]
    rollout: str = ""


class RollbackRequest(Body):
    """`to`: the revision to restore; null: the one that served before."""

    to: Reference | None = None
    message: Message = ""


class AppRollbackRequest(Body):
    """The message of the history's entry."""

    message: Message = ""


class PinRequest(Body):
    """The revision that serves a tenant's callers; null: remove the pin, so that the weights
    decide."""

    tenant: str = Field(max_length=63)
    revision: Reference | None


class Moved(Body):
    """A function's traffic after a change."""

    app: str
    function: str
    revision: str | None
    traffic: dict[str, Any]


class AppMoved(Body):
    """The traffic of an app's functions after a change of all of them."""

    functions: list[Moved]


class ApproveRequest(Body):
    """An optional note for the record."""

    note: str = Field(default="", max_length=2000)


class Approved(Body):
    """The number of approvals that a revision still needs."""

    app: str
    function: str
    revision: str
    missing: int


class AliasRequest(Body):
    """The revision to which an alias refers."""

    revision: Reference


class Aliases(Body):
    """A function's aliases: name → revision."""

    aliases: dict[str, str]


class PolicyBody(Body):
    """An app's release policy."""

    approvals: int = Field(
        ge=0,
        le=approvals.MAX_APPROVALS,
        description="number of keys that must approve a new revision before it takes traffic",
    )


@router.get("/{app}/functions/{function}/revisions")
def revision_list(
    context: Ctx, here: Here, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> RevisionList:
    """List a function's revisions, newest first."""
    with context.store.read() as sql:
        return RevisionList(
            revisions=revision_manifests.listing(sql, here.place, here.function, limit=limit)
        )


@router.get("/{app}/functions/{function}/revisions:diff")
def revision_diff(
    context: Ctx,
    here: Here,
    before: Annotated[str, Query(alias="from", max_length=128)],
    after: Annotated[str, Query(alias="to", max_length=128)],
) -> dict[str, Any]:
    """Return the differences between two revisions, and which of them break callers of the
    first."""
    with context.store.read() as sql:
        traffic.find(sql, here.place, here.function)
        names = [aliases.resolve(sql, here.place, here.function, name) for name in (before, after)]
        return revision_manifests.diff(
            sql, here.place, here.function, before=names[0], after=names[1]
        )


@router.get("/{app}/functions/{function}/revisions/{revision}")
def revision_manifest(context: Ctx, here: Here, revision: RevisionName) -> dict[str, Any]:
    """Return a revision's manifest: what it pins, and its metadata."""
    with context.store.read() as sql:
        traffic.find(sql, here.place, here.function)
        return revision_manifests.revision_manifest(
            sql,
            here.place,
            here.function,
            aliases.resolve(sql, here.place, here.function, revision),
        )


@router.post("/{app}/functions/{function}/revisions/{revision}:approve")
def approve(context: Ctx, here: Here, revision: RevisionName, body: ApproveRequest) -> Approved:
    """Approve a revision for traffic. The key that deployed it may not approve it."""
    with context.store.write() as write:
        traffic.find(write.sql, here.place, here.function)
        name = aliases.resolve(write.sql, here.place, here.function, revision)
        missing = approvals.approve(
            write, here.place, function=here.function, revision=name, note=body.note
        )
    return Approved(app=here.place.app, function=here.function, revision=name, missing=missing)


@router.post("/{app}/functions/{function}:promote", dependencies=[REQUIRE_DISK_SPACE])
def promote(context: Ctx, here: Here, body: PromoteRequest) -> Promoted:
    """Serve an existing revision."""
    if body.override_freeze:
        here.caller.require_scope(Scope.ADMIN)
    terms = ReleaseOptions(
        metadata=RevisionMetadata(lineage=body.meta, evaluation=body.evaluation),
        plan=plan.parse(body.rollout) if body.rollout is not None else None,
        allow_breaking=body.allow_breaking,
        override_freeze=body.override_freeze,
    )

    def make(write: Write) -> tuple[str, ReleaseResult]:
        return releases.promote(
            write,
            here.place,
            function=here.function,
            reference=body.revision,
            terms=terms,
            message=body.message,
        )

    name, done = release_gates.write_with_gates(context.store, make)
    return Promoted(
        app=here.place.app,
        function=here.function,
        revision=name,
        stage=done.stage.value,
        rollout=done.rollout,
    )


@router.post("/{app}/functions/{function}:rollback")
def rollback(context: Ctx, here: Here, body: RollbackRequest) -> Moved:
    """Move all traffic to a revision at once: the given one, or the one that served before."""

    def make(write: Write) -> tuple[str, TrafficDocument]:
        return releases.rollback(
            write, here.place, function=here.function, reference=body.to, message=body.message
        )

    name, document = release_gates.write_with_gates(context.store, make)
    return Moved(
        app=here.place.app,
        function=here.function,
        revision=name,
        traffic=traffic.describe_traffic(document),
    )


@router.post("/{app}:rollback")
def rollback_app(
    context: Ctx, caller: Deployer, request: RequestId, app: AppName, body: AppRollbackRequest
) -> AppMoved:
    """Move all traffic of each function of the app to the revision that served before, or change
    none of them."""
    caller.require_app(app)
    place = app_ref_of(caller, app, request)

    def make(write: Write) -> dict[str, tuple[str, TrafficDocument]]:
        return app_rollback.rollback(write, place, message=body.message)

    moved = release_gates.write_with_gates(context.store, make)
    return AppMoved(
        functions=[
            Moved(
                app=app,
                function=function,
                revision=revision,
                traffic=traffic.describe_traffic(document),
            )
            for function, (revision, document) in moved.items()
        ]
    )


@router.post("/{app}/functions/{function}:pin")
def pin(context: Ctx, here: Here, body: PinRequest) -> Moved:
    """Pin a tenant's callers to a revision, regardless of the weights."""

    def make(write: Write) -> TrafficDocument:
        return releases.pin_tenant(
            write, here.place, function=here.function, tenant=body.tenant, reference=body.revision
        )

    document = release_gates.write_with_gates(context.store, make)
    return Moved(
        app=here.place.app,
        function=here.function,
        revision=document.pins.get(body.tenant),
        traffic=traffic.describe_traffic(document),
    )


@router.get("/{app}/functions/{function}/aliases")
def alias_list(context: Ctx, here: Here) -> Aliases:
    """List a function's aliases, both platform and user aliases."""
    with context.store.read() as sql:
        traffic.find(sql, here.place, here.function)
        return Aliases(aliases=aliases.aliases_for(sql, here.place.function_id(here.function)))


@router.put("/{app}/functions/{function}/aliases/{alias}", dependencies=[REQUIRE_DISK_SPACE])
def alias_set(context: Ctx, here: Here, alias: AppName, body: AliasRequest) -> Aliases:
    """Set an alias to a revision."""
    with context.store.write() as write:
        return Aliases(
            aliases=aliases.set_alias(
                write, here.place, function=here.function, alias=alias, reference=body.revision
            )
        )


@router.delete("/{app}/functions/{function}/aliases/{alias}", status_code=204)
def alias_delete(context: Ctx, here: Here, alias: AppName) -> Response:
    """Delete an alias."""
    with context.store.write() as write:
        aliases.set_alias(write, here.place, function=here.function, alias=alias, reference=None)
    return Response(status_code=204)


@router.get("/{app}/policy")
def policy(context: Ctx, caller: Deployer, app: AppName) -> PolicyBody:
    """Return the app's release policy."""
    caller.restrict(app, None)
    with context.store.read() as sql:
        return PolicyBody(approvals=approvals.policy(sql, app_ref_of(caller, app, "")).approvals)


@router.put("/{app}/policy", dependencies=[REQUIRE_DISK_SPACE])
def protect(
    context: Ctx, caller: Admin, request: RequestId, app: AppName, body: PolicyBody
) -> PolicyBody:
    """Require approvals for new revisions of the app before they take traffic."""
    caller.require_app(app)
    with context.store.write() as write:
        return PolicyBody(
            approvals=approvals.set_policy(
                write, app_ref_of(caller, app, request), approvals=body.approvals
            ).approvals
        )
