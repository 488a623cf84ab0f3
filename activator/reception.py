"""Who is calling, and what: the first two steps of every request, the same for calls, raw HTTP and WebSockets."""

from __future__ import annotations

import time

from activator.admission import StrangerLimit
from activator.callers import ANONYMOUS, Caller
from activator.entry import Entrance, Entry, split_tenant
from activator.request import Request
from activator.routes import RouteTable
from activator.targets import Targets, choose
from pilotlight import errors
from pilotlight.types import DEFAULT_ENVIRONMENT, FunctionAddress, TenantId, parse_function_path

RAW = "/fn/"
NOBODY = "-"
"""Stands for the id of a tenant that there is not."""


class Reception:
    """Finds callers, functions, and the way of the one into the other. Owner: the event loop; every method is synchronous."""

    def __init__(self, *, table: RouteTable, entrance: Entrance, strangers: StrangerLimit) -> None:
        self._table = table
        self._entrance = entrance
        self._strangers = strangers

    def __repr__(self) -> str:
        return f"<Reception {self._table!r}>"

    def authenticate(self, request: Request) -> Caller:
        """Who is calling. Raises Unauthenticated, or TooManyRequests for an address that keeps guessing."""
        authorization = request.headers.get(b"authorization", b"")
        if not self._table.is_known(authorization):
            self._strangers.guard(request.address, time.monotonic())
        try:
            return self._table.authenticate(authorization, time.time())
        except errors.Unauthenticated:
            self._strangers.check(request.address, time.monotonic())
            raise

    def identify(self, request: Request, owner: str | None) -> Caller:
        """`authenticate`, but that a public function of a tenant that is named may be called without a key."""
        if owner is not None and b"authorization" not in request.headers:
            return ANONYMOUS
        return self.authenticate(request)

    def reader(self, request: Request) -> Caller:
        """Who asks for a submitted call. Raises Forbidden for a key that may not call, and for a suspended tenant's."""
        caller = self.authenticate(request)
        caller.check_may_call()
        self._entrance.check_not_suspended(caller.tenant)
        return caller

    def targets(self, request: Request, caller: Caller, path: str, owner: str | None = None) -> tuple[Targets, str]:
        """The revisions of the function at `path`, and the method asked for. Raises NotFound, Forbidden, Unauthenticated, Unavailable."""
        try:
            app, function, method = parse_function_path(path)
        except ValueError as e:
            raise errors.NotFound(str(e)) from e
        asked = request.headers.get(b"pilotlight-environment", b"").decode("latin-1")
        environment = asked or caller.environment or DEFAULT_ENVIRONMENT
        caller.check_reach(environment=environment, app=app, function=function)
        tenant = caller.tenant if owner is None else self._table.tenant_named(owner) or NOBODY
        address = FunctionAddress(tenant=TenantId(tenant), environment=environment, app=app, function=function, method=method)
        try:
            return self._table.targets_for(caller, address), method
        except errors.NotFound as e:
            if not caller.is_anonymous:
                raise
            self._strangers.guard(request.address, time.monotonic())
            self._strangers.check(request.address, time.monotonic())
            raise errors.Unauthenticated("no API key: send the header 'Authorization: Bearer <key>'") from e

    def enter(self, request: Request, caller: Caller, targets: Targets) -> Entry:
        """The way in, of which the answer tells the quotas whatever becomes of the request. Raises Forbidden."""
        entry = self._entrance.entry(caller, choose(targets), request.address)
        request.gate = entry.gate
        request.tenant = caller.tenant or entry.target.tenant
        return entry

    def raw_entry(self, request: Request) -> Entry:
        """`/fn/{app}/{function}/rest`, also under `/t/{tenant}`: the caller at the function."""
        owner, place = split_tenant(request.path)
        app, _, rest = place.removeprefix(RAW).partition("/")
        caller = self.identify(request, owner)
        targets, _ = self.targets(request, caller, f"{app}/{rest.partition('/')[0]}", owner)
        return self.enter(request, caller, targets)
