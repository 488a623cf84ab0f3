"""A form that calls a function as the signed-in key.

The call is a submitted call: the controller queues it, an activator runs it with the rights and
quotas of the session's key, and the page of the call shows its state and result. The key's text is
not needed, and pages never hold it."""

from __future__ import annotations

import json
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import Depends, Form, Query, Request
from fastapi.responses import RedirectResponse, Response

from pilotlight.controller.analytics import function_stats
from pilotlight.controller.context import require_disk_space
from pilotlight.controller.dashboard.html import render
from pilotlight.controller.dashboard.page_context import MAX_NAME, PageContext, PageRoute, Visitor
from pilotlight.controller.dashboard.pages.functions.apps import example_body
from pilotlight.controller.database.store import Write
from pilotlight.controller.deployments import app_registry
from pilotlight.controller.identity import sessions
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.scheduling import dispatch_queue
from pilotlight.errors import Forbidden, InvalidInput, NotFound, PilotlightError, TooManyRequests
from pilotlight.protocol import CallRecord, new_call_id
from pilotlight.spec.function import FunctionKind

MAX_BODY = 16_384
"""Characters of the JSON body that the form takes: encoded as a form they are up to three times as
many bytes."""
MAX_WAITING = 50
"""Calls of a tenant that wait for an activator, beyond which the form refuses more."""
LABEL = {"from": "dashboard"}
_Name = Annotated[str, Form(max_length=MAX_NAME)]
_CALLABLE = (None, FunctionKind.FUNCTION, FunctionKind.CLASS)

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@router.get("/dashboard/invoke")
async def form(
    visit: Visitor, function: Annotated[str, Query(max_length=MAX_NAME)] = ""
) -> Response:
    """Render the form for a function (`app/name`)."""
    visit.require_deploy("calling a function here requires")
    return await _page(visit, function=function)


@router.post("/dashboard/invoke", dependencies=[Depends(require_disk_space)])
async def submit(
    *,
    visit: Visitor,
    request: Request,
    function: _Name,
    method: _Name = "",
    body: Annotated[str, Form(max_length=MAX_BODY)] = "",
    form: _Name = "",
) -> Response:
    """Queue the call, and go to its page. Raises Forbidden; other errors are shown in the form."""
    sessions.require_same_site(request.headers, cookie=visit.form, field=form)
    visit.require_deploy("calling a function here requires")
    if visit.caller.suspended:
        raise Forbidden(
            f"tenant {visit.caller.tenant_name!r} is suspended: it cannot call functions"
        )
    try:
        call = await visit.context.threads.run(
            visit.caller.tenant, _submit, visit, function, method, body
        )
    except (InvalidInput, NotFound, TooManyRequests) as e:
        return await _page(visit, function=function, method=method, body=body, error=e)
    return RedirectResponse(visit.link(f"/dashboard/calls/{call}"), status_code=303)


async def _page(
    visit: PageContext,
    *,
    function: str,
    method: str = "",
    body: str | None = None,
    error: PilotlightError | None = None,
) -> Response:
    def load(sql: sa.Connection) -> tuple[list[str], list[dict[str, Any]]]:
        try:
            methods = _methods(sql, visit, function) if function else []
        except (InvalidInput, NotFound):
            if error is None:
                raise
            methods = []
        return function_stats.names(sql, **visit.where), methods

    known, methods = await visit.read(load)
    named = next((one for one in methods if one.get("name", "") == method), None)
    example = named or (methods[0] if methods else {})
    return render(
        "invoke.html",
        status=error.status if error is not None else 200,
        visit=visit,
        known=known,
        function=function,
        methods=[one.get("name", "") for one in methods],
        method=method,
        body=example_body(example) if body is None else body,
        error=str(error or ""),
        max_body=MAX_BODY,
    )


def _methods(sql: sa.Connection, visit: PageContext, function: str) -> list[dict[str, Any]]:
    """Return a function's methods. Raises NotFound, or InvalidInput for one that is not called with
    JSON arguments."""
    app, _, name = function.partition("/")
    found = app_registry.app(sql, **visit.where, name=app)
    spec = next((one["spec"] for one in found["functions"] if one["name"] == name), None)
    if spec is None:
        raise NotFound(f"there is no function {function} in environment {visit.environment!r}")
    if spec.get("kind") not in _CALLABLE:
        raise InvalidInput(
            f"{function} is a web application or an engine: call it at its address "
            f"(/dashboard/apps/{app})",
            parameter="function",
        )
    if found["stopped"]:
        raise InvalidInput(f"app {app!r} is stopped: deploy it again first", parameter="function")
    return list(spec.get("methods", ()))


def _submit(visit: PageContext, function: str, method: str, body: str) -> str:
    try:
        arguments = json.loads(body) if body.strip() else {}
    except (ValueError, RecursionError) as e:
        raise InvalidInput(f"the body is not JSON: {e}", parameter="body") from e
    if not isinstance(arguments, dict | list):
        raise InvalidInput(
            "the body must be a JSON object (arguments by name) or array (by position)",
            parameter="body",
        )
    with visit.context.store.write() as write:
        names = [one.get("name", "") for one in _methods(write.sql, visit, function)]
        if method not in names:
            there = ", ".join(repr(name) for name in names)
            raise InvalidInput(
                f"{function} has no method {method!r}; available: {there}", parameter="method"
            )
        return _enqueue(write, visit, function, method, body.strip() or "{}")


def _enqueue(write: Write, visit: PageContext, function: str, method: str, body: str) -> str:
    waiting = dispatch_queue.waiting(write.sql, tenant=visit.caller.tenant)
    if waiting >= MAX_WAITING:
        raise TooManyRequests(
            f"{waiting} calls of this tenant wait for an activator, the limit of this form is "
            f"{MAX_WAITING}: try again later",
            retry_after_s=5,
        )
    app, _, name = function.partition("/")
    record = CallRecord(
        id=new_call_id(),
        tenant=visit.caller.tenant,
        environment=visit.environment,
        app=app,
        function=name,
        method=method,
        state="QUEUED",
        sequence=1,
        submitted_at=write.now,
        expires_at=write.now + dispatch_queue.KEPT_S,
        labels=LABEL,
    )
    document = dispatch_queue.payload(
        record, body=body.encode(), key=visit.caller.key, customer=visit.caller.customer_of(None)
    )
    dispatch_queue.enqueue_call(write, document, due_at=write.now)
    return record.id
