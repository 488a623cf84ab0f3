"""Raw requests of `/fn/` as calls: the functions that accept them, and their form in records and
traces."""

from __future__ import annotations

from activator.access.grants import AccessGrant
from activator.calls.call import Call
from activator.http.request import Request
from activator.routing.call_target import CallTarget
from pilotlight import errors
from pilotlight.spec.function import FunctionKind


def route_of(target: CallTarget) -> str:
    """Return the route name of raw requests in traces."""
    return f"/fn/{target.app}/{target.function}"


def call_of(request: Request, entry: AccessGrant) -> Call:
    """Return the call of a raw request, without its body."""
    call = Call(
        id=request.id,
        target=entry.target,
        method="",
        key_id=entry.caller.key_id,
        body=b"",
        rank=entry.rank(request.headers),
        caller=entry.foreign,
        choice=request.choice,
    )
    call.began_ns, call.routed_ns = request.began_ns, request.routed_ns
    return call


def expect_web(target: CallTarget) -> None:
    """Raise NotFound for a function that is not a web application."""
    if target.spec.kind is not FunctionKind.ASGI:
        raise errors.NotFound(
            f"{target.app}/{target.function} is not a web application: call it at "
            f"/v1/functions/{target.app}/{target.function}:invoke"
        )
