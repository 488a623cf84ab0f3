"""Routes for instances, Templates, logs and commands on the node. Requests go to the node agent,
limited to the caller's tenant."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Query, Response

from pilotlight.controller.api import schemas
from pilotlight.controller.context import (
    REQUIRE_DISK_SPACE,
    Context,
    Ctx,
    Deployer,
    RequestId,
    app_ref_of,
    deployer,
)
from pilotlight.controller.database import audit_trail
from pilotlight.controller.deployments import app_registry
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.server.ndjson import NdjsonResponse
from pilotlight.errors import NotFound
from pilotlight.protocol import CONTENT_NDJSON
from pilotlight.spec.record_json import canonical_json
from snapshotter.types import InstanceId, InstanceInfo, RevisionKey

MAX_TAIL = 100_000
MAX_NOTED_BYTES = 4_096
"""Bytes of a command stored in the audit log, whose entries cannot be deleted."""
NDJSON: dict[int | str, dict[str, Any]] = {200: {"content": {CONTENT_NDJSON: {}}}}

router = APIRouter(prefix="/v1", tags=["node"])


def _labels(caller: Principal, app: str | None, function: str | None) -> dict[str, str]:
    # The tenant comes from the key, never from the request: this isolates tenants from each other.
    # A key that is bound to an app sees only that app.
    app, function = caller.restrict(app, function)
    requested = {"app": app, "function": function}
    return {
        "tenant": caller.tenant,
        "environment": caller.environment,
        **{k: v for k, v in requested.items() if v},
    }


async def _owned(context: Context, caller: Principal, instance: str) -> InstanceInfo:
    for found in await context.agent.instances(_labels(caller, None, None)):
        if found.id == instance:
            return found
    raise NotFound(
        f"there is no instance {instance} in environment {caller.environment!r}", instance=instance
    )


def _record_audit(
    context: Context,
    caller: Principal,
    *,
    request: str,
    action: str,
    subject: str,
    argv: list[str] | None = None,
) -> None:
    after = {"argv": argv} if argv is None else _audited_argv(argv)
    with context.store.write() as write:
        audit_trail.record(
            write,
            tenant=caller.tenant,
            actor=caller.key,
            action=action,
            subject=subject,
            after=after,
            request=request,
        )


def _audited_argv(argv: list[str]) -> dict[str, Any]:
    """Return a command as the audit log stores it: whole if it is short, else its beginning with
    its length and hash."""
    text = canonical_json(argv)
    if len(text) <= MAX_NOTED_BYTES:
        return {"argv": argv}
    begin, left = [], MAX_NOTED_BYTES // 4  # a character may have four bytes, and JSON more
    for word in argv:
        begin.append(word[:left])
        left -= len(word)
        if left <= 0:
            break
    return {
        "argv": begin,
        "cut": True,
        "sha256": hashlib.sha256(text).hexdigest(),
        "bytes": len(text),
    }


def _require_known(
    context: Context, caller: Principal, *, request: str, app: str, function: str | None
) -> None:
    with context.store.read() as sql:
        app_registry.require_known(sql, app_ref_of(caller, app, request), function)


@router.get("/instances", response_model=schemas.Instances)
async def instances(
    context: Ctx, caller: Deployer, app: str | None = None, function: str | None = None
) -> dict[str, Any]:
    """List the live instances of the environment."""
    found = await context.agent.instances(_labels(caller, app, function))
    return {"instances": [i.to_json() for i in found]}


@router.post("/instances/{instance}:stop", status_code=204)
async def stop_instance(
    context: Ctx,
    caller: Deployer,
    request: RequestId,
    instance: str,
    grace_s: Annotated[float, Query(ge=0, le=3600)] = 10.0,
) -> Response:
    """Stop an instance: it receives SIGTERM and has `grace_s` seconds to finish its work. Responds
    once it has exited."""
    await _owned(context, caller, instance)
    await context.threads.run(
        caller.tenant,
        _record_audit,
        context,
        caller,
        request=request,
        action="instance.stop",
        subject=instance,
    )
    await context.agent.stop(InstanceId(instance), grace_s=grace_s)
    return Response(status_code=204)


@router.post(
    "/instances/{instance}:exec",
    dependencies=[REQUIRE_DISK_SPACE],
    status_code=200,
    response_class=NdjsonResponse,
    responses=NDJSON,
)
async def exec_beside(
    context: Ctx, caller: Deployer, request: RequestId, instance: str, body: schemas.ExecRequest
) -> NdjsonResponse:
    """Run a command alongside an instance. Streams lines `{"stream", "text"}`, then
    `{"exit_status"}`."""
    found = await _owned(context, caller, instance)
    record = partial(
        _record_audit,
        context,
        caller,
        request=request,
        action="instance.exec",
        subject=instance,
        argv=body.argv,
    )
    await context.threads.run(caller.tenant, record)
    return NdjsonResponse(context.agent.exec(found.id, body.argv), request=request)


@router.get("/logs", status_code=200, response_class=NdjsonResponse, responses=NDJSON)
async def logs(
    *,
    context: Ctx,
    caller: Deployer,
    request: RequestId,
    app: str | None = None,
    function: str | None = None,
    instance: str | None = None,
    call: str | None = None,
    since: Annotated[float | None, Query(description="seconds since the epoch")] = None,
    tail: Annotated[int | None, Query(ge=0, le=MAX_TAIL)] = None,
    follow: bool = False,
) -> NdjsonResponse:
    """Stream log lines `{"time", "instance", "stream", "call", "text"}`, oldest first, including
    those of stopped instances."""
    if app is not None:
        await context.threads.run(
            caller.tenant,
            _require_known,
            context,
            caller,
            request=request,
            app=app,
            function=function,
        )
    labels = _labels(caller, app, function)
    lines = await context.agent.logs(
        labels=labels, instance_id=instance, since=since, tail=tail, call_id=call, follow=follow
    )
    return NdjsonResponse(lines, request=request)


@router.get("/templates", response_model=schemas.Templates)
async def templates(context: Ctx, caller: Deployer) -> dict[str, Any]:
    """List the resident Templates of the environment."""
    labels = _labels(caller, None, None).items()
    return {
        "templates": [
            t.to_json() for t in await context.agent.templates() if labels <= dict(t.labels).items()
        ]
    }


@router.delete("/templates/{revision}", status_code=204)
async def drop_template(
    context: Ctx, caller: Deployer, request: RequestId, revision: str
) -> Response:
    """Release the memory of a Template; its instances keep running. The next start is a RESTORE if
    there is a snapshot, else COLD."""
    labels = _labels(caller, None, None).items()
    if not any(
        t.revision == revision and labels <= dict(t.labels).items()
        for t in await context.agent.templates()
    ):
        raise NotFound(
            f"there is no Template of {revision} in environment {caller.environment!r}",
            revision=revision,
        )
    await context.threads.run(
        caller.tenant,
        _record_audit,
        context,
        caller,
        request=request,
        action="template.drop",
        subject=revision,
    )
    await context.agent.drop_template(RevisionKey(revision))
    return Response(status_code=204)


@router.get("/node", dependencies=[Depends(deployer)])
async def node(context: Ctx) -> dict[str, Any]:
    """Return the machine's capabilities: `{"features": [{"name", "on", "why"}], "node": {…}}`."""
    capabilities = dict(await context.agent.capabilities())
    # a refusal names files and lines of user code, possibly another tenant's
    if snapshots := capabilities.get("node", {}).get("snapshots"):
        public = {key: value for key, value in snapshots.items() if key != "last_refusal"}
        capabilities["node"] = {**capabilities["node"], "snapshots": public}
    return capabilities
