"""Routes for listing submitted calls and redriving dead letters. The activators answer requests for
a single call that has not been stored yet."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Depends, Path, Query, Response
from pydantic import Field

from pilotlight.controller.api.schemas import Body
from pilotlight.controller.context import (
    REQUIRE_DISK_SPACE,
    Ctx,
    Deployer,
    Invoker,
    RequestId,
    require_platform_token,
)
from pilotlight.controller.database import audit_trail
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.scheduling import dispatch_queue, submitted_calls
from pilotlight.controller.scheduling.submitted_calls import DEAD, CallQuery
from pilotlight.errors import Conflict
from pilotlight.protocol import CALLS_PATH

router = APIRouter(prefix="/v1", tags=["submitted calls"])
internal = APIRouter(dependencies=[Depends(require_platform_token)], include_in_schema=False)
MAX_REDRIVEN = 1000
"""Dead letters that one request redrives at most; the response says whether there are more."""
State = Literal["QUEUED", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "DEAD"]


class CallList(Body):
    """Calls (`CallRecord`, without results), newest first."""

    calls: list[dict[str, Any]]


class RedriveRequest(Body):
    """Which dead letters to redrive: all of them, those of an app, or those of a function."""

    app: str | None = None
    function: str | None = Field(default=None, description="requires `app`")
    limit: int = Field(default=MAX_REDRIVEN, ge=1, le=MAX_REDRIVEN)


class Redriven(Body):
    """Dead letters that were queued again, under their original ids."""

    calls: list[str]
    more: bool = Field(description="there may be more: repeat the request")


@router.get("/calls")
def list_calls(
    *,
    context: Ctx,
    caller: Invoker,
    state: Annotated[
        State | None,
        Query(description="DEAD: failed on its last attempt and can be redriven"),
    ] = None,
    app: str | None = None,
    function: str | None = None,
    schedule: Annotated[
        str | None, Query(max_length=100, description="started by this schedule")
    ] = None,
    before: Annotated[
        float | None,
        Query(
            description="submitted before this time (seconds since the epoch), for the next page"
        ),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> CallList:
    """List the environment's submitted calls that the key may access and that are still
    retained."""
    app, function = caller.restrict(app, function)
    filters = CallQuery(
        tenant=caller.tenant,
        environment=caller.environment,
        app=app,
        function=function,
        state=state,
        schedule=schedule,
        before=before,
    )
    with context.store.read() as sql:
        return CallList(calls=submitted_calls.listing(sql, filters, limit=limit))


@internal.get(f"{CALLS_PATH}/{{call}}")
def get_call_of_function(
    context: Ctx,
    call: Annotated[str, Path(max_length=128)],
    tenant: Annotated[str, Query(max_length=128)],
) -> dict[str, Any]:
    """Return a call to an activator, which checks which function asks for it."""
    with context.store.read() as sql:
        return submitted_calls.get(sql, tenant=tenant, call=call)


@router.post("/calls:redrive", dependencies=[REQUIRE_DISK_SPACE], status_code=202)
def redrive_calls(
    context: Ctx, caller: Deployer, request: RequestId, body: RedriveRequest
) -> Redriven:
    """Queue dead letters again, oldest first."""
    app, function = caller.restrict(body.app, body.function)
    filters = CallQuery(
        tenant=caller.tenant, environment=caller.environment, app=app, function=function
    )
    with context.store.write() as write:
        sent, more = dispatch_queue.redrive(write, filters, limit=body.limit)
        subject = "/".join(part for part in (caller.environment, app, function) if part)
        _record_audit(write, caller, subject, {"calls": len(sent)}, request)
    return Redriven(calls=sent, more=more)


@router.post("/calls/{call}:redrive", dependencies=[REQUIRE_DISK_SPACE], status_code=202)
def redrive_call(
    context: Ctx,
    caller: Deployer,
    request: RequestId,
    call: Annotated[str, Path(max_length=128)],
    response: Response,
) -> Redriven:
    """Queue one dead letter again, under its original id."""
    app, function = caller.restrict(None, None)
    filters = CallQuery(
        tenant=caller.tenant, environment=caller.environment, app=app, function=function, call=call
    )
    with context.store.write() as write:
        submitted_calls.get(write.sql, tenant=caller.tenant, call=call)
        sent, _ = dispatch_queue.redrive(write, filters, limit=1)
        if not sent:
            hint = (
                f"List dead letters: `pilotlight call list --state dead`. A call becomes {DEAD} "
                "when it fails on its last attempt."
            )
            raise Conflict(f"call {call} is not a dead letter of this environment", hint=hint)
        _record_audit(write, caller, call, None, request)
    response.headers["location"] = f"/v1/calls/{call}"
    return Redriven(calls=sent, more=False)


def _record_audit(write: Write, caller: Principal, subject: str, after: Any, request: str) -> None:
    audit_trail.record(
        write,
        tenant=caller.tenant,
        actor=caller.key,
        action="call.redrive",
        subject=subject,
        after=after,
        request=request,
    )
