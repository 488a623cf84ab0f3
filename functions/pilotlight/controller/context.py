"""The state that requests share, created once at start, and the dependencies that provide it."""

from __future__ import annotations

import hmac
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, TypeVar, cast

import sqlalchemy as sa
from fastapi import Depends, Header, Request

from pilotlight.controller.billing.build_charges import BuildUsage
from pilotlight.controller.collections.waiters import QueueWaiters
from pilotlight.controller.database.change_notifier import ChangeNotifier
from pilotlight.controller.database.store import Store, Write
from pilotlight.controller.identity import access_control
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.identity.sign_in_codes import SignInCodes
from pilotlight.controller.kubernetes.function_status import FunctionStatuses
from pilotlight.controller.kubernetes.node_reports import NodeReports
from pilotlight.controller.kubernetes.warm.status import WarmPods
from pilotlight.controller.node_snapshots.register import SnapshotRegister
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.server.metrics import Metrics
from pilotlight.controller.server.node_backend import NodeBackend
from pilotlight.controller.server.request_id import request_id
from pilotlight.controller.server.tenant_threads import TenantThreads
from pilotlight.controller.settings import ControllerConfig
from pilotlight.controller.sign_in.device_sign_ins import DeviceSignIns
from pilotlight.controller.sign_in.issuers import SignInIssuers
from pilotlight.controller.volumes.service import VolumeService
from pilotlight.controller.weights.blob_gc import BlobCollector
from pilotlight.controller.weights.blobs import BlobStore
from pilotlight.core.crypto import PlatformKey
from pilotlight.core.disk_floor import DiskFloor, no_floor
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from pilotlight.errors import Forbidden, StorageFull
from pilotlight.protocol import HEADER_ENVIRONMENT
from pilotlight.spec.identifiers import Scope
from snapshotter.agent.launch_signature import KEY_LABEL, LaunchSigner
from weight_cache.client import WeightCacheClient

T = TypeVar("T")
_READING = ("GET", "HEAD", "OPTIONS")
UPLOADS_AT_ONCE = 4
"""Uploads of batch files, and of chunks of volumes, of a tenant: each holds some MiB in memory."""
DOWNLOADS_AT_ONCE = 4
"""Downloads of a tenant, each of which holds pieces in memory until its reader has read them: of a
blob 8 MiB, of a volume's file 32 MiB, of a prediction log 16 MiB, of a batch's answers 64 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The components of a running controller. `clock` is wall time in seconds since the epoch.

    `statuses`: of functions in a cluster; `warm_pods`: its pool. `nodes`: the cluster's nodes,
    as they report themselves; `node_key` authenticates them; `register`: their snapshots, None on
    one machine. `grants` seals launch documents for the node agent of this machine; None on a
    cluster, whose reconciler seals them. `builds`: usage and charges of image builds.
    `database_floor`: free disk space that tenants' changes must leave for the ledger. `threads`:
    the threads that each tenant uses. `uploads`, `downloads`: its transfers that take memory.
    `codes`: unused sign-in codes of the dashboard. `issuers`: by which people sign in;
    `devices`: their pending sign-ins from the command line. `waiters`: requests that wait for a
    value of a queue."""

    config: ControllerConfig
    store: Store
    files: BlobStore
    key: PlatformKey
    agent: NodeBackend
    cache: WeightCacheClient
    notifier: ChangeNotifier
    metrics: Metrics
    clock: Callable[[], float]
    statuses: FunctionStatuses = field(default_factory=FunctionStatuses)
    nodes: NodeReports = field(default_factory=NodeReports)
    warm_pods: WarmPods = field(default_factory=WarmPods)
    node_key: PlatformKey | None = None
    register: SnapshotRegister | None = None
    builds: BuildUsage = field(default_factory=BuildUsage)
    database_floor: DiskFloor = field(default_factory=no_floor)
    threads: TenantThreads = field(default_factory=TenantThreads)
    uploads: TenantThreads = field(default_factory=lambda: TenantThreads(UPLOADS_AT_ONCE))
    downloads: TenantThreads = field(default_factory=lambda: TenantThreads(DOWNLOADS_AT_ONCE))
    codes: SignInCodes = field(default_factory=SignInCodes)
    issuers: SignInIssuers = field(init=False)
    devices: DeviceSignIns = field(init=False)
    collector: BlobCollector = field(init=False)
    volumes: VolumeService = field(init=False)
    waiters: QueueWaiters = field(default_factory=QueueWaiters)
    grants: LaunchSigner | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "collector", BlobCollector(self.files, self.store))
        object.__setattr__(self, "volumes", self._volumes())
        issuers = SignInIssuers(
            self.config.issuers, secrets=self.config.issuer_secrets, clock=self.clock
        )
        object.__setattr__(self, "issuers", issuers)
        object.__setattr__(self, "devices", DeviceSignIns(issuers))
        self.notifier.at_close.append(self.waiters.close)
        is_local = self.config.platform.fleet == "local"
        object.__setattr__(
            self, "grants", LaunchSigner(self.key.derived(KEY_LABEL)) if is_local else None
        )

    def _volumes(self) -> VolumeService:
        return VolumeService(
            files=self.files,
            store=self.store,
            agent=lambda: self.agent,
            plans=self.config.plans,
            threads=self.threads,
            uploads=self.uploads,
            downloads=self.downloads,
        )

    async def read(self, tenant: str, query: Callable[[sa.Connection], T]) -> T:
        """Run `query` in a read transaction, in one of the tenant's threads."""

        def run() -> T:
            with self.store.read() as sql:
                return query(sql)

        return await self.threads.run(tenant, run)

    async def write(self, tenant: str, change: Callable[[Write], T]) -> T:
        """Run `change` in a write transaction, in one of the tenant's threads."""

        def run() -> T:
            with self.store.write() as write:
                return change(write)

        return await self.threads.run(tenant, run)


def context_of(request: Request) -> Context:
    """Return the context of the application that serves `request`."""
    return cast(Context, request.app.state.context)


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
            return access_control.authenticate(
                sql, authorization=authorization, environment=environment, now=context.clock()
            )

    caller = await context.threads.look_up(authenticate)
    if request.method not in _READING:
        caller.require_active()
    if inspect.iscoroutinefunction(request.scope["endpoint"]):
        yield caller
        return
    async with context.threads.share(caller.tenant):
        yield caller


_PRINCIPAL = Depends(principal, scope="function")


def _require_scope(scope: Scope) -> Callable[[Principal], Awaitable[Principal]]:
    async def require_scope(caller: Annotated[Principal, _PRINCIPAL]) -> Principal:
        caller.require_scope(scope)
        return caller

    return require_scope


AnyKey = Annotated[Principal, _PRINCIPAL]
"""A caller with a valid key of any scope."""
biller = _require_scope(Scope.READ_BILLING)
Biller = Annotated[Principal, Depends(biller)]
"""A caller that may see costs, plans and quotas."""
Invoker = Annotated[Principal, Depends(_require_scope(Scope.INVOKE))]
deployer = _require_scope(Scope.DEPLOY)
Deployer = Annotated[Principal, Depends(deployer)]
Admin = Annotated[Principal, Depends(_require_scope(Scope.ADMIN))]


async def require_disk_space(context: Ctx) -> None:
    """Reject a change that makes the database larger while its free disk space is below the floor.
    Raises StorageFull."""
    if context.database_floor.missing_bytes():
        raise StorageFull(f"{context.database_floor.describe()}; nothing was changed")


async def _room_for(context: Ctx, _caller: AnyKey) -> None:
    await require_disk_space(context)


REQUIRE_DISK_SPACE = Depends(_room_for)
"""Dependency of routes whose changes grow the database. Other routes, above all deletion and
rollback, work on a full disk too."""


async def require_platform_token(
    context: Ctx, token: Annotated[str, Header(alias=HEADER_PLATFORM_TOKEN)] = ""
) -> None:
    """Admit only the platform's own processes. Raises Forbidden."""
    if not hmac.compare_digest(token.encode(), context.key.token.encode()):
        raise Forbidden(
            f"this path is reserved for the platform's own processes: the header "
            f"{HEADER_PLATFORM_TOKEN} is missing or wrong"
        )


async def require_node_token(
    context: Ctx, token: Annotated[str, Header(alias=HEADER_PLATFORM_TOKEN)] = ""
) -> None:
    """Also admit node agents, which have a key of their own. Raises Forbidden."""
    if not hmac.compare_digest(
        token.encode(), (context.node_key or context.key).node_token.encode()
    ):
        await require_platform_token(context, token)


def app_ref_of(caller: Principal, app: str, request: str) -> AppRef:
    """Return the place of `app` for a change by `caller`."""
    return AppRef(
        tenant=caller.tenant,
        uid=caller.uid,
        environment=caller.environment,
        app=app,
        actor=caller.key,
        request=request,
    )
