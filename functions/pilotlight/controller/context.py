"""The state that requests share, created once at start, and the dependencies that provide it."""

from __future__ import annotations

import hmac
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, cast

from fastapi import Depends, Header, Request

from pilotlight.controller import access
from pilotlight.controller.access import Principal
from pilotlight.controller.agents import Agent
from pilotlight.controller.bell import Bell
from pilotlight.controller.blobs import BlobFiles
from pilotlight.controller.builds import Builds
from pilotlight.controller.cluster.status import Statuses
from pilotlight.controller.metrics import Metrics
from pilotlight.controller.nodes import Nodes
from pilotlight.controller.places import Place
from pilotlight.controller.settings import ControllerConfig
from pilotlight.controller.store import Store
from pilotlight.controller.stored.collector import Collector
from pilotlight.controller.threads import TenantThreads
from pilotlight.errors import Forbidden, StorageFull
from pilotlight.protocol import HEADER_ENVIRONMENT, HEADER_PLATFORM_TOKEN
from pilotlight.seal import PlatformKey
from pilotlight.types import Scope
from snapshotter.grants import KEY_LABEL, Grants
from weight_cache.client import WeightCacheClient
from weight_cache.disk import DiskFloor, no_floor

_READING = ("GET", "HEAD", "OPTIONS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The components of a running controller. `clock` is wall time in seconds since the epoch.

    `statuses`: of functions in a cluster. `nodes`: the cluster's nodes, as they report themselves;
    `node_key` authenticates them. `grants` seals launch documents for the node agent of this
    machine; None on a cluster, whose reconciler seals them. `builds`: usage and charges of image
    builds. `database_floor`: free disk space that tenants' changes must leave for the ledger.
    `threads`: the threads that each tenant uses."""

    config: ControllerConfig
    store: Store
    files: BlobFiles
    key: PlatformKey
    agent: Agent
    cache: WeightCacheClient
    bell: Bell
    metrics: Metrics
    clock: Callable[[], float]
    statuses: Statuses = field(default_factory=Statuses)
    nodes: Nodes = field(default_factory=Nodes)
    node_key: PlatformKey | None = None
    builds: Builds = field(default_factory=Builds)
    database_floor: DiskFloor = field(default_factory=no_floor)
    threads: TenantThreads = field(default_factory=TenantThreads)
    collector: Collector = field(init=False)
    grants: Grants | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "collector", Collector(self.files, self.store))
        is_local = self.config.platform.fleet == "local"
        object.__setattr__(
            self, "grants", Grants(self.key.derived(KEY_LABEL)) if is_local else None
        )


def context_of(request: Request) -> Context:
    """Return the context of the application that serves `request`."""
    return cast(Context, request.app.state.context)


def request_id(request: Request) -> str:
    """Return the id of this request, which its response carries."""
    return str(request.scope.get("pilotlight.request_id", ""))


Ctx = Annotated[Context, Depends(context_of)]
RequestId = Annotated[str, Depends(request_id)]


async def principal(
    request: Request,
    context: Ctx,
    authorization: Annotated[str | None, Header(description="`Bearer pl_…`")] = None,
    environment: Annotated[
        str | None,
        Header(alias=HEADER_ENVIRONMENT, description="default: the key's own, else `main`"),
    ] = None,
) -> AsyncIterator[Principal]:
    """Authenticate the caller. Raises Unauthenticated, or Forbidden, also when a suspended tenant
    tries to change something.

    A route that runs in a thread holds one of its tenant's threads until it returns. A route that
    runs on the event loop acquires one for each blocking part."""

    def authenticate() -> Principal:
        with context.store.read() as sql:
            return access.authenticate(
                sql, authorization=authorization, environment=environment, now=context.clock()
            )

    caller = await context.threads.look_up(authenticate)
    if caller.suspended and request.method not in _READING:
        raise Forbidden(
            f"tenant {caller.tenant_name!r} is suspended: it can read but not change anything; the "
            f"platform's operator can resume it"
        )
    if inspect.iscoroutinefunction(request.scope["endpoint"]):
        yield caller
        return
    async with context.threads.share(caller.tenant):
        yield caller


_PRINCIPAL = Depends(principal, scope="function")


def _at_least(scope: Scope) -> Callable[[Principal], Awaitable[Principal]]:
    async def require_scope(caller: Annotated[Principal, _PRINCIPAL]) -> Principal:
        caller.require_scope(scope)
        return caller

    return require_scope


Known = Annotated[Principal, _PRINCIPAL]
"""A caller with a valid key of any scope."""
biller = _at_least(Scope.READ_BILLING)
Biller = Annotated[Principal, Depends(biller)]
"""A caller that may see costs, plans and quotas."""
Invoker = Annotated[Principal, Depends(_at_least(Scope.INVOKE))]
deployer = _at_least(Scope.DEPLOY)
Deployer = Annotated[Principal, Depends(deployer)]
Admin = Annotated[Principal, Depends(_at_least(Scope.ADMIN))]


async def room(context: Ctx) -> None:
    """Reject a change that makes the database larger while its free disk space is below the floor.
    Raises StorageFull."""
    if context.database_floor.missing_bytes():
        raise StorageFull(f"{context.database_floor.describe()}; nothing was changed")


async def _room_for(context: Ctx, _caller: Known) -> None:
    await room(context)


ROOM = Depends(_room_for)
"""Dependency of routes whose changes grow the database. Other routes, above all deletion and
rollback, work on a full disk too."""


async def platform_token(
    context: Ctx, token: Annotated[str, Header(alias=HEADER_PLATFORM_TOKEN)] = ""
) -> None:
    """Admit only the platform's own processes. Raises Forbidden."""
    if not hmac.compare_digest(token.encode(), context.key.token.encode()):
        raise Forbidden(
            f"this path is reserved for the platform's own processes: the header "
            f"{HEADER_PLATFORM_TOKEN} is missing or wrong"
        )


async def node_token(
    context: Ctx, token: Annotated[str, Header(alias=HEADER_PLATFORM_TOKEN)] = ""
) -> None:
    """Also admit node agents, which have a key of their own. Raises Forbidden."""
    if not hmac.compare_digest(
        token.encode(), (context.node_key or context.key).node_token.encode()
    ):
        await platform_token(context, token)


def place(caller: Principal, app: str, request: str) -> Place:
    """Return the place of `app` for a change by `caller`."""
    return Place(
        tenant=caller.tenant,
        uid=caller.uid,
        environment=caller.environment,
        app=app,
        actor=caller.key,
        request=request,
    )
