"""Routes for stored traces of calls. A key that may call a function may read its traces."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import anyio.to_thread
from fastapi import Depends, Query, Request

from pilotlight.controller.analytics import traces
from pilotlight.controller.api.account.billing import parse_time
from pilotlight.controller.context import Context, Ctx, Invoker, require_platform_token
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.errors import InvalidInput
from pilotlight.protocol import TRACES_PATH

MAX_NAME = 200
MAX_POST = 1000
Name = Annotated[str | None, Query(max_length=MAX_NAME)]
Why = Literal["asked", "drawn", "error", "cold", "slow", "shadow"]
Time = Annotated[
    str | None, Query(max_length=MAX_NAME, description="seconds since the epoch, or ISO 8601")
]

router = APIRouter(prefix="/v1/traces", tags=["traces"])
internal = APIRouter(dependencies=[Depends(require_platform_token)], include_in_schema=False)


@router.get("")
def list_traces(
    *,
    context: Ctx,
    caller: Invoker,
    app: Name = None,
    function: Annotated[
        str | None, Query(max_length=MAX_NAME, description="`app/function`, or a function of `app`")
    ] = None,
    revision: Name = None,
    arm: Name = None,
    call: Annotated[
        str | None,
        Query(max_length=MAX_NAME, description="the call's id (X-Request-Id of its response)"),
    ] = None,
    kept_for: Why | None = None,
    start_kind: Annotated[
        str | None, Query(pattern="^(CACHED|WARM|WAKE|FORK|RESTORE|IMPORT|COLD)$")
    ] = None,
    failed: bool | None = None,
    min_ms: Annotated[float | None, Query(ge=0, le=1e12)] = None,
    since: Time = None,
    until: Time = None,
    cursor: Annotated[
        str | None, Query(max_length=MAX_NAME, description="`cursor` of the previous page")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
) -> dict[str, Any]:
    """List the environment's traces, newest first. `cursor` starts the next page; null: this is the
    last page."""
    if function is not None and "/" in function:
        app, _, function = function.partition("/")
    app, function = caller.restrict(app, function)
    before, before_call = _position(cursor)
    filters = traces.TraceQuery(
        tenant=caller.tenant,
        environment=caller.environment,
        app=app,
        function=function,
        revision=revision,
        arm=arm,
        call=call,
        kept_for=kept_for,
        start_kind=start_kind,
        failed=failed,
        min_ms=min_ms,
        since=parse_time("since", since),
        until=parse_time("until", until),
        before=before,
        before_call=before_call,
    )
    with context.store.read() as sql:
        found = traces.listing(sql, filters, limit=limit)
    return {
        "traces": found,
        "cursor": f"{found[-1]['at']!r}~{found[-1]['call']}" if len(found) == limit else None,
    }


def _position(cursor: str | None) -> tuple[float | None, str]:
    if cursor is None:
        return None, ""
    at, _, call = cursor.partition("~")
    return parse_time("cursor", at), call


@router.get("/{trace}")
def get_trace(context: Ctx, caller: Invoker, trace: str) -> dict[str, Any]:
    """Return a trace by its id, or by the id of a call in it: its `calls` and their `spans`, with
    times in ms from the trace's start."""
    with context.store.read() as sql:
        return traces.get(sql, caller, trace)


@internal.post(TRACES_PATH)
async def put_traces(context: Ctx, request: Request) -> dict[str, int]:
    """Store an activator's traces."""
    return {"accepted": await anyio.to_thread.run_sync(_put, context, await request.body())}


def _put(context: Context, text: bytes) -> int:
    try:
        received: Any = json.loads(text)["traces"]
    except (ValueError, KeyError, TypeError) as e:
        raise InvalidInput('traces: expected {"activator": id, "traces": [...]}') from e
    if not isinstance(received, list) or len(received) > MAX_POST:
        raise InvalidInput(f"traces: must be a list of at most {MAX_POST}", parameter="traces")
    with context.store.write() as write:
        return traces.put(write, received, keep=context.config.settings.traces_per_tenant)
