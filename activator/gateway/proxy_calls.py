"""A raw request of `/fn/` as a call: of which functions there are any, and what it is in their
records and traces."""

from __future__ import annotations

from activator.calls.runner import Call
from activator.http.request import Request
from activator.routing.access import AccessGrant
from activator.routing.call_target import CallTarget
from pilotlight import errors
from pilotlight.spec import FunctionKind


def route_of(target: CallTarget) -> str:
    """What its traces are called by."""
    return f"/fn/{target.app}/{target.function}"


def call_of(request: Request, entry: AccessGrant) -> Call:
    """The call that a raw request is; its body is no part of it."""
    call = request.call = Call(
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
    """Raises NotFound for a function that is no web application."""
    if target.spec.kind is not FunctionKind.ASGI:
        raise errors.NotFound(
            f"{target.app}/{target.function} is not a web application: call it at "
            f"/v1/functions/{target.app}/{target.function}:invoke"
        )
