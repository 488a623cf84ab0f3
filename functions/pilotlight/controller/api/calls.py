"""Submitted calls in lists, and dead letters sent again. One call, while it is wanted at once, is
answered by whoever has it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Response
from pydantic import Field

from pilotlight.controller import audit, calls, due
from pilotlight.controller.access import Principal
from pilotlight.controller.api.models import Body
from pilotlight.controller.calls import DEAD, Wanted
from pilotlight.controller.context import ROOM, Ctx, Deployer, Invoker, RequestId
from pilotlight.controller.store import Write
from pilotlight.errors import Conflict

router = APIRouter(prefix="/v1", tags=["submitted calls"])
MAX_REDRIVEN = 1000
"""Dead letters that one request sends again; the answer says whether there are more."""
State = Literal["QUEUED", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "DEAD"]


class CallList(Body):
    """Calls (`CallRecord`, without results), newest first."""

    calls: list[dict[str, Any]]


class RedriveRequest(Body):
    """Which dead letters are sent again: all of them, of an app, or of a function."""

    app: str | None = None
    function: str | None = Field(default=None, description="needs `app`")
    limit: int = Field(default=MAX_REDRIVEN, ge=1, le=MAX_REDRIVEN)


class Redriven(Body):
    """Dead letters that were sent again, under the ids that they had."""

    calls: list[str]
    more: bool = Field(description="there may be more: ask again")


@router.get("/calls")
def list_calls(
    *,
    context: Ctx,
    caller: Invoker,
    state: Annotated[
        State | None,
        Query(description="DEAD: failed after the last attempt, and waits to be sent again"),
    ] = None,
    app: str | None = None,
    function: str | None = None,
    schedule: Annotated[
        str | None, Query(max_length=100, description="begun by this schedule")
    ] = None,
    before: Annotated[
        float | None, Query(description="submitted before (seconds since the epoch): the next page")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> CallList:
    """Submitted calls of the environment, as far as the key reaches and as long as they are
    kept."""
    app, function = caller.restrict(app, function)
    wanted = Wanted(
        tenant=caller.tenant,
        environment=caller.environment,
        app=app,
        function=function,
        state=state,
        schedule=schedule,
        before=before,
    )
    with context.store.read() as sql:
        return CallList(calls=calls.listing(sql, wanted, limit=limit))


@router.post("/calls:redrive", dependencies=[ROOM], status_code=202)
def redrive_calls(
    context: Ctx, caller: Deployer, request: RequestId, body: RedriveRequest
) -> Redriven:
    """Send dead letters again, the oldest first."""
    app, function = caller.restrict(body.app, body.function)
    wanted = Wanted(
        tenant=caller.tenant, environment=caller.environment, app=app, function=function
    )
    with context.store.write() as write:
        sent, more = due.redrive(write, wanted, limit=body.limit)
        subject = "/".join(part for part in (caller.environment, app, function) if part)
        _note(write, caller, subject, {"calls": len(sent)}, request)
    return Redriven(calls=sent, more=more)


@router.post("/calls/{call}:redrive", dependencies=[ROOM], status_code=202)
def redrive_call(
    context: Ctx,
    caller: Deployer,
    request: RequestId,
    call: Annotated[str, Path(max_length=128)],
    response: Response,
) -> Redriven:
    """Send one dead letter again, under the id that it has."""
    app, function = caller.restrict(None, None)
    wanted = Wanted(
        tenant=caller.tenant, environment=caller.environment, app=app, function=function, call=call
    )
    with context.store.write() as write:
        calls.get(write.sql, tenant=caller.tenant, call=call)
        sent, _ = due.redrive(write, wanted, limit=1)
        if not sent:
            hint = (
                f"See them: `pilotlight call list --dead`. Its state is listed as {DEAD} once "
                f"it failed for the last time."
            )
            raise Conflict(f"call {call} is no dead letter of this environment", hint=hint)
        _note(write, caller, call, None, request)
    response.headers["location"] = f"/v1/calls/{call}"
    return Redriven(calls=sent, more=False)


def _note(write: Write, caller: Principal, subject: str, after: Any, request: str) -> None:
    audit.record(
        write,
        tenant=caller.tenant,
        actor=caller.key,
        action="call.redrive",
        subject=subject,
        after=after,
        request=request,
    )
