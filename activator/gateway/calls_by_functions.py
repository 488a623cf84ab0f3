"""Calls that functions make: requests at the socket of an instance (`instance_sockets`), as
requests to the gateway.

The socket is the identity: only processes of the instance's slot reach it, so a function needs no
key, and no secret can be stolen, or left in a snapshot. What a request may not choose is derived
from the call that runs on the instance: tenant and environment, deadline, trace, depth. Of several
running calls the request names its own (`HEADER_PARENT`); a call that does not run there is
refused. When the calling attempt ends, so do the calls that its function waits for.

Only calls are served: invoke, submit, the state and result of submitted calls, and the names of
functions that are bound to arguments; and volumes, dicts and queues (`FunctionStorage`), which need
no running call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from activator.access.grants import parse_tenant_prefix
from activator.balancing.instance import Instance
from activator.calls.attempt import Attempt
from activator.control_plane.function_storage import FunctionStorage, parse_storage_path
from activator.http.request import CALLING, Receive, Request, Scope, Send
from activator.routing.api_keys import FunctionPrincipal
from activator.routing.call_origin import CallingFunction, CallOrigin
from activator.routing.call_target import CallTarget
from pilotlight import errors
from pilotlight.protocol import (
    HEADER_CUSTOMER,
    HEADER_ENVIRONMENT,
    HEADER_PARENT,
    HEADER_PRIORITY,
    HEADER_TAG,
    HEADER_TIMEOUT,
    HEADER_WEBHOOK,
)

HANDLING_S = 0.5
"""Time that a function keeps, of what its own call has left, to handle a call that ran out of
time; a tenth of what is left where that is less."""
MAX_NAMED = 64
"""Calls that `HEADER_PARENT` may name: the members of a batch."""
WAY_OUT = "use an API key from a secret (PILOTLIGHT_API_KEY) for it"

_CALL = re.compile(r"/v1/functions/[^/]+/([^/]+):(invoke|submit)")
_READ = re.compile(r"/v1/calls/[^/:]+(/stream)?")
_BIND = re.compile(r"/v1/functions/[^/]+/[^/]+:bind")
_CANCEL = re.compile(r"/v1/calls/[^/:]+:cancel")
_CUSTOMER = HEADER_CUSTOMER.encode()
_ENVIRONMENT = HEADER_ENVIRONMENT.encode()
_PARENT = HEADER_PARENT.encode()
_PRIORITY = HEADER_PRIORITY.encode()
_TIMEOUT = HEADER_TIMEOUT.encode()
_OURS = b"pilotlight-"
_CHOSEN = frozenset({_CUSTOMER, _PRIORITY, HEADER_TAG.encode(), HEADER_WEBHOOK.encode()})
"""Headers of ours that a function may choose."""
_DROPPED = frozenset({b"authorization", b"cookie", b"traceparent", b"tracestate"})


class InstanceConnection(Protocol):
    """A connection at an instance's socket."""

    transport: Any

    @property
    def instances(self) -> Sequence[Instance]: ...

    @property
    def target(self) -> CallTarget: ...

    @property
    def caller(self) -> FunctionPrincipal: ...


class Application(Protocol):
    """ASGI 3."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class CallsByFunctions:
    """The ASGI application behind the sockets of instances."""

    def __init__(
        self, gateway: Application, *, max_depth: int, storage: FunctionStorage | None = None
    ) -> None:
        """`max_depth`: most calls between the first function and the last one. `storage`: None
        where there is no controller."""
        self._gateway = gateway
        self._storage = storage
        self._max_depth = max_depth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI 3."""
        connection: InstanceConnection = scope["connection"]
        request = Request(scope, receive, send)
        try:
            caller = connection.caller
            if connection.target.spec.sandbox:
                raise errors.Forbidden(f"a sandbox calls nothing without a key: {WAY_OUT}")
            asked = parse_storage_path(request.path) if request.verb == "POST" else None
            if asked is not None and self._storage is not None:
                require_own(request, caller)
                await self._storage.answer(request, caller, asked)
                return
            verb = require_call_api(request)
            require_own(request, caller)
            named = request.headers.get(_PARENT)
            attempt = attempt_of(calling_instance(connection.instances, named), named, verb)
            if attempt is not None and verb:
                self._inherit(request, verb, attempt, connection.target)
                origin = origin_of(attempt, connection.target)
            else:
                scope["headers"] = own_headers(request.headers, {})
                origin = None
            scope[CALLING] = CallingFunction(caller, origin)
        except errors.PilotlightError as e:
            await request.respond_error(e)
            return
        if attempt is None or verb == "submit":
            await self._gateway(scope, receive, send)
        else:
            await self._while_it_runs(attempt, connection, scope, receive, send)

    async def _while_it_runs(
        self,
        attempt: Attempt,
        connection: InstanceConnection,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Serve a request that ends with the attempt that makes it."""
        if attempt.callees is None:
            attempt.callees = set()
        transport = connection.transport
        attempt.callees.add(transport)
        try:
            await self._gateway(scope, receive, send)
        finally:
            attempt.callees.discard(transport)

    def _inherit(self, request: Request, verb: str, attempt: Attempt, target: CallTarget) -> None:
        """Set the headers that a call takes over from the one that makes it. Raises InvalidInput,
        DeadlineExceeded."""
        called = request.path.removeprefix("/v1/functions/").rpartition(":")[0]
        origin_of(attempt, target).require_depth(called, self._max_depth)
        headers = request.headers
        inherited = {
            b"traceparent": attempt.call.traceparent_of_callee(headers.get(b"traceparent"))
        }
        if _PRIORITY not in headers:
            inherited[_PRIORITY] = attempt.call.caller.rank.priority.value.encode()
        if _CUSTOMER not in headers and attempt.call.caller.customer:
            inherited[_CUSTOMER] = attempt.call.caller.customer.encode()
        if verb == "invoke":
            inherited[_TIMEOUT] = b"%.3f" % limited_s(request.deadline_s(), attempt.remaining_s())
        elif _TIMEOUT in headers:  # a submitted call goes on without the one that made it
            inherited[_TIMEOUT] = headers[_TIMEOUT]
        request.scope["headers"] = own_headers(headers, inherited)


def require_call_api(request: Request) -> str:
    """Return the verb of a call, `invoke` or `submit`; "" for a request about a submitted call, and
    for the name of a bound function.
    Raises Forbidden for all others."""
    owner, _ = parse_tenant_prefix(request.path)
    if owner is not None:
        raise errors.Forbidden(
            f"a function calls functions of its own tenant without a key, and not those of "
            f"{owner[:64]!r}: {WAY_OUT}"
        )
    path, method = request.path, request.verb
    if method == "POST" and (found := _CALL.fullmatch(path)) is not None:
        return found[2]
    reads = method == "GET" and _READ.fullmatch(path)
    writes = method == "POST" and (_CANCEL.fullmatch(path) or _BIND.fullmatch(path))
    if reads or writes:
        return ""
    raise errors.Forbidden(
        f"{method[:16]} {path[:128]}: without a key, a function may only call functions and read "
        f"the results of those calls: {WAY_OUT}"
    )


def require_own(request: Request, caller: FunctionPrincipal) -> None:
    """Raise Forbidden for a request that names another environment."""
    asked = request.headers.get(_ENVIRONMENT, b"").decode("latin-1")
    if asked and asked != caller.environment:
        raise errors.Forbidden(
            f"a function of environment {caller.environment!r} calls functions of its own "
            f"environment without a key, and not those of {asked[:64]!r}: {WAY_OUT}"
        )


def calling_instance(instances: Sequence[Instance], named: bytes | None) -> Instance:
    """Return which one of the instances in a pod makes a request: the one that runs the call that
    `named` (HEADER_PARENT) has, or the only one that runs any. Raises InvalidInput."""
    found = [
        one
        for one in instances
        if (named_attempt(one, named) if named is not None else one.running)
    ]
    if named is None and len(found) > 1:
        raise errors.InvalidInput(
            f"calls run on {len(found)} instances of this pod: the header {HEADER_PARENT} must "
            f"name the one that makes this call, as the SDK does",
            parameter=HEADER_PARENT,
        )
    return found[0] if found else instances[0]


def attempt_of(instance: Instance, named: bytes | None, verb: str) -> Attempt | None:
    """Return the attempt that makes a request. One that is no call (`verb` is "") needs none: a
    function may read results at any time. Raises Forbidden, InvalidInput."""
    return running_attempt(instance, named) if verb else named_attempt(instance, named or b"")


def named_attempt(instance: Instance, named: bytes) -> Attempt | None:
    """Return the first running attempt that HEADER_PARENT names; None where none of them runs."""
    for call in named.decode("latin-1").split(",", MAX_NAMED)[:MAX_NAMED]:
        attempt = instance.running.get(call.strip())
        if isinstance(attempt, Attempt):
            return attempt
    return None


def running_attempt(instance: Instance, named: bytes | None) -> Attempt:
    """Return the attempt in which a function of the instance makes a call: the first running one
    that `named` (HEADER_PARENT) has, or the only one. Raises Forbidden, InvalidInput."""
    running = instance.running
    if named is not None:
        if (attempt := named_attempt(instance, named)) is not None:
            return attempt
        raise errors.Forbidden(
            f"call {named[:64].decode('latin-1')} does not run on instance {instance.id}: a "
            f"function calls others while its own call runs; to call afterwards, {WAY_OUT}"
        )
    if not running:
        raise errors.Forbidden(
            f"no call runs on instance {instance.id}: a function calls others while its own call "
            f"runs, and not in enter() or between calls; there, {WAY_OUT}"
        )
    if len(running) > 1:
        raise errors.InvalidInput(
            f"{len(running)} calls run on instance {instance.id}: the header {HEADER_PARENT} must "
            f"name the one that makes this call; the SDK sends it, in a thread of your own if that "
            f"was started with contextvars.copy_context().run(…)",
            parameter=HEADER_PARENT,
        )
    (only,) = running.values()
    assert isinstance(only, Attempt)
    return only


def origin_of(attempt: Attempt, target: CallTarget) -> CallOrigin:
    """Return the origin of a call that the function `target` makes in this attempt."""
    before = attempt.call.caller.origin
    chain = before.chain if before is not None else ()
    return CallOrigin(attempt.record_id, (*chain, f"{target.app}/{target.function}"))


def limited_s(asked_s: float | None, left_s: float) -> float:
    """Return the deadline in seconds of a call whose caller asks for `asked_s`, and has `left_s`
    left itself. Raises DeadlineExceeded where nothing is left."""
    usable_s = left_s - min(HANDLING_S, left_s / 10)
    if usable_s < 0.001:
        raise errors.DeadlineExceeded(
            "the call that makes this one has no time left", clock="execution"
        )
    return usable_s if asked_s is None else min(asked_s, usable_s)


def own_headers(
    headers: Mapping[bytes, bytes], inherited: Mapping[bytes, bytes]
) -> list[tuple[bytes, bytes]]:
    """Return the headers of a function's request as the gateway gets them: without those that only
    the platform sets, and with those that it set."""
    kept = [
        (name, value)
        for name, value in headers.items()
        if name not in _DROPPED
        and not name.startswith(b"x-forwarded-")
        and (name in _CHOSEN or not name.startswith(_OURS))
        and name not in inherited
    ]
    return [*kept, *inherited.items()]
