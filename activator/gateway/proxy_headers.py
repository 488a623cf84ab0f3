"""Raw requests of `/fn/` as calls: the functions that accept them, the headers of a request that
reach the function, its root path, and those of the response that reach the caller."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from activator.access.grants import AccessGrant
from activator.calls.call import Call
from activator.calls.response import weights_timing
from activator.http import cookies
from activator.http.payloads import Payload
from activator.http.request import HOP_BY_HOP, Headers, Request, Scope, subpath, tenant_prefix
from activator.routing.call_target import CallTarget
from pilotlight import errors
from pilotlight.protocol import (
    HEADER_ARM,
    HEADER_OUTCOME,
    HEADER_RATE_LIMIT,
    HEADER_RATE_LIMIT_POLICY,
    HEADER_REPLAYED,
    WORKER_ASGI,
)
from pilotlight.spec.function import FunctionKind

_HOP_BY_HOP = HOP_BY_HOP - {b"host"}  # which the application sees
_UNDER = WORKER_ASGI.encode()
_OURS = b"pilotlight-"
"""Prefix of headers between the activator and its workers; a caller's headers with it are dropped,
so that it cannot forge them."""
_REQUEST_ID = b"x-request-id"
_COOKIE = b"cookie"
_FORWARDED_FOR = b"x-forwarded-for"
_NOT_FOR_WORKERS = _HOP_BY_HOP | {
    b"authorization",
    b"content-length",
    b"forwarded",
    b"proxy-authorization",
    b"traceparent",
    b"tracestate",
    b"x-real-ip",
    _FORWARDED_FOR,
}
"""Headers that are not forwarded: user code never sees a caller's API key, the trace continues with
our span as the parent, and no caller chooses the address that an application takes for its own."""
_OURS_TO_SAY = frozenset(
    {
        b"date",
        b"server",
        _REQUEST_ID,
        HEADER_RATE_LIMIT.encode(),
        HEADER_RATE_LIMIT_POLICY.encode(),
        HEADER_REPLAYED.encode(),
    }
)
"""Response headers that the function cannot set."""
_FOR_CALLERS = frozenset({HEADER_OUTCOME.encode()})
"""Headers with our prefix that the function's worker sets for its caller; what else has it is the
platform's own word."""
_OF_THE_ORIGIN = frozenset(
    {
        b"accept-ch",
        b"alt-svc",
        b"clear-site-data",
        b"critical-ch",
        b"nel",
        b"origin-agent-cluster",
        b"proxy-authenticate",
        b"report-to",
        b"reporting-endpoints",
        b"service-worker-allowed",
        b"set-login",
        b"strict-transport-security",
        b"use-as-dictionary",
        b"www-authenticate",
        b"x-content-type-options",
    }
)
"""Headers whose effect a browser stores for the origin, or prompts for in its name: the origin
belongs to the platform."""
_SANDBOX = b"sandbox allow-scripts allow-forms allow-popups allow-modals allow-downloads"
"""Pages of functions share the dashboard's origin: their scripts must not act as the user who is
signed in there."""


def mount_path(scope: Scope, target: CallTarget) -> str:
    """Return `/fn/{app}/{function}` with the tag in the path, so that links that the function makes
    stay with its revision."""
    prefix = tenant_prefix(scope)
    _, at, tag = str(scope["path"])[len(prefix) :].split("/", 4)[3].partition("@")
    return f"{prefix}/fn/{target.app}/{target.function}{at}{tag}"


def declared_length(request: Request) -> int | None:
    """Return the length of the request's body that its caller declared; None for a body without
    one, and where there is no body. (The server has refused invalid and repeated ones.)"""
    declared = request.headers.get(b"content-length")
    return int(declared) if declared is not None else None


def request_head(request: Request, call: Call, *, has_body: bool) -> bytes:
    """Return the head of the request to the worker. Its body has the length that the caller
    declared, because WSGI applications read no other (PEP 3333), or is sent chunked. Applications
    get their caller's `x-request-id`, if any, and not the call's id in its place: there are
    frameworks that answer 400 to one that is no UUID."""
    place = mount_path(request.scope, call.target).encode()
    is_engine = call.target.spec.engine is not None
    under = b"" if is_engine else _UNDER  # an engine's paths are its own
    lines = [b"%s %s%s HTTP/1.1" % (request.verb.encode(), under, subpath(request.scope))]
    lines += [
        b"%s: %s" % (name, cookies.without_ours(value) if name == _COOKIE else value)
        for name, value in request.scope["headers"]
        if _is_for_worker(name) and not (is_engine and name == _REQUEST_ID)
    ]
    if _is_address(request.address):
        lines.append(b"%s: %s" % (_FORWARDED_FOR, request.address.encode()))
    lines += [
        b"pilotlight-call: " + request.id.encode(),
        b"pilotlight-root-path: " + place,
    ]
    if is_engine:
        lines.append(_REQUEST_ID + b": " + request.id.encode())
    lines.append(
        b"pilotlight-deadline-s: %.3f" % call.remaining_s(call.target.spec.clocks.execution_s)
    )
    lines += [f"{name}: {value}".encode() for name, value in arm_of(call).items()]
    if has_body:
        length = declared_length(request)
        lines.append(
            b"transfer-encoding: chunked" if length is None else b"content-length: %d" % length
        )
    return b"\r\n".join(lines) + call.trace_lines() + b"\r\n\r\n"


def _is_for_worker(name: bytes) -> bool:
    plain = name.replace(b"_", b"-")  # WSGI applications see no difference (PEP 3333)
    return plain not in _NOT_FOR_WORKERS and not plain.startswith(_OURS)


def _is_address(text: str) -> bool:
    """Whether a caller has an address: functions that call others are named by their uid."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def arm_of(call: Call) -> dict[str, str]:
    """Return the header with the experiment arm of a call; empty where it is in none."""
    return {HEADER_ARM: call.choice.arm} if call.choice is not None and call.choice.arm else {}


def answer_headers(request: Request, call: Call, headers: Headers) -> Headers:
    """Return the response headers: our own, and those that the function may set."""
    own: Headers = [
        (_REQUEST_ID, request.id.encode()),
        (b"pilotlight-revision", call.target.revision.encode()),
        (b"pilotlight-start", call.start_kind.encode()),
        (
            b"server-timing",
            b"queue;dur=%.2f, start;dur=%.2f%b"
            % (call.queued_ms, call.start_ms, weights_timing(call)),
        ),
    ]
    own += [(name.encode(), value.encode()) for name, value in arm_of(call).items()]
    if call.target.spec.cors:
        own.append((b"vary", b"Origin"))  # also without an Origin: caches keep this response
    passed_on = [(k, v) for k, v in headers if k not in _HOP_BY_HOP and not _is_ours_to_say(k)]
    return own + request.quota_headers() + passed_on


def _is_ours_to_say(name: bytes) -> bool:
    return name in _OURS_TO_SAY or (name.startswith(_OURS) and name not in _FOR_CALLERS)


def restrict_public_headers(headers: Headers, mount: str) -> Headers:
    """Add the sandbox headers, because a browser may show the response, and confine cookies to
    `mount`; headers about its content are unchanged."""
    return [
        *_confined(headers, mount.encode()),
        (b"content-security-policy", _SANDBOX),
        (b"x-content-type-options", b"nosniff"),
    ]


def _confined(headers: Headers, mount: bytes) -> Iterator[tuple[bytes, bytes]]:
    for name, value in headers:
        if name in _OF_THE_ORIGIN:
            continue
        if name != b"set-cookie":
            yield name, value
        elif (cookie := cookies.confine(value, mount)) is not None:
            yield name, cookie


def route_of(target: CallTarget) -> str:
    """Return the route name of raw requests in traces."""
    return f"/fn/{target.app}/{target.function}"


def call_of(request: Request, entry: AccessGrant) -> Call:
    """Return the call of a raw request, without its body."""
    call = Call(
        id=request.id,
        target=entry.target,
        method="",
        payload=Payload(b""),
        caller=entry.caller_of(request.headers),
        choice=request.choice,
    )
    call.began_ns, call.routed_ns = request.began_ns, request.routed_ns
    return call


def require_web(target: CallTarget) -> None:
    """Raise NotFound for a function that is not a web application."""
    if target.spec.kind is not FunctionKind.ASGI:
        raise errors.NotFound(
            f"{target.app}/{target.function} is not a web application: call it at "
            f"/v1/functions/{target.app}/{target.function}:invoke"
        )
