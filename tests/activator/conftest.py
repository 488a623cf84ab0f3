"""An activator in the test's own event loop: real gateway, throttlers, journal and HTTP; the fleet
and the ledger are fakes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from activator.access.grants import AccessCache
from activator.access.resolver import RequestResolver
from activator.arguments.checker import ArgumentChecker
from activator.async_calls.api import RemoteCalls
from activator.async_calls.service import AsyncCalls
from activator.autoscaler.autoscaler_loop import AutoscalerLoop
from activator.autoscaler.instance_reconciler import InstanceReconciler
from activator.autoscaler.warm_up import WarmUp
from activator.balancing.cutover import CutoverTracker
from activator.balancing.fleet import Fleet
from activator.balancing.global_queue import GlobalQueue
from activator.balancing.instance_lifecycle import InstanceProvisioner
from activator.balancing.throttler import Throttler
from activator.billing.service import BillingService
from activator.calls.fallback import FallbackChain
from activator.calls.response_store import ResponseStore
from activator.calls.runner import CallRunner
from activator.control_plane.bindings import BindingsApi
from activator.control_plane.proxy import UNREAD_S, ControlPlaneProxy, ProxyLimits
from activator.coordination.state import InstanceLeases
from activator.fairness.start_admission import StartAdmission
from activator.gateway.calls_by_functions import CallsByFunctions
from activator.gateway.cors import CrossOrigin
from activator.gateway.forwarded_callers import ForwardedCallers
from activator.gateway.functions_api import FunctionsApi
from activator.gateway.gateway import Apis, Gateway
from activator.gateway.health import Health, HealthApi
from activator.gateway.http_proxy import HttpProxy
from activator.gateway.instance_sockets import InstanceSockets
from activator.gateway.pipeline import CallPipeline
from activator.gateway.response_writer import CallObserver, ResponseWriter
from activator.gateway.shadow_traffic import ShadowTraffic
from activator.guards.checks import CheckTerms
from activator.guards.function_client import GuardFunctionClient
from activator.guards.guards import Guards
from activator.guards.refusals import RefusalReporter
from activator.http.bodies import Bodies
from activator.http.connection_limits import ConnectionLimits
from activator.http.dashboard_host import DashboardHost
from activator.http.server import ClientConnection
from activator.idempotency.middleware import Idempotency
from activator.idempotency.process_store import ProcessIdempotency
from activator.lifecycle import server_config
from activator.llm.engine_throttler import EngineThrottler
from activator.llm.openai.api import OpenAI
from activator.metrics.metrics import Metrics
from activator.open_inference.api import OpenInferenceApi
from activator.prediction_log.queue import PredictionQueue
from activator.quotas.process_store import ProcessQuotas
from activator.quotas.store_protocol import QuotaStore
from activator.quotas.unauthenticated_limit import UnauthenticatedRateLimiter
from activator.resilience.breaker import BreakerTerms
from activator.response_cache.cache_hits import CacheHitAccount
from activator.response_cache.cached_calls import CachedCalls, SharedResponses
from activator.response_cache.single_flight import SingleFlight
from activator.routing.route_table import CallTarget
from activator.settings import ActivatorSettings
from activator.tokens.token_authentication import TokenAuthentication
from activator.tokens.token_callers import TokenCallers
from activator.tracing.trace_builder import Json
from activator.tracing.tracer import Tracer
from pilotlight.core.oidc.issuer_client import IssuerClient
from pilotlight.core.transport.endpoint import Endpoint
from pilotlight.core.transport.public_listener import open_functions_socket
from pilotlight.protocol import BudgetState, FeedChange, FunctionRoute, UsageRecord
from tests.fakes.fake_controller import FakeController
from tests.fakes.fake_fleet import FakeFleet
from tests.fakes.fake_worker import Behaviour, Script
from tests.fakes.plain_http import NO_TLS
from tests.fakes.quiet_server import QuietServer
from tests.fakes.routes import TENANT, TEST_KEY, change, empty_table

KEY = "pl_test"
PATIENCE_S = 30.0
"""Of callers and of the edge: they share one event loop, and on a busy machine a turn of it may
take a second."""


class MemoryLedger:
    """Keeps what it is given (`shipping.Ledger`)."""

    def __init__(self) -> None:
        self.records: dict[str, UsageRecord] = {}

    async def accept(self, records: Sequence[bytes]) -> Mapping[str, BudgetState]:
        """See shipping.Ledger."""
        for record in records:
            usage = UsageRecord.from_json(json.loads(record))
            self.records.setdefault(usage.id, usage)
        return {}

    async def budgets(self, ids: Collection[str] = ()) -> Mapping[str, BudgetState]:
        """There are none here."""
        return {}

    async def aclose(self) -> None:
        """Nothing to close."""


async def _nothing_to_catch_up() -> None:
    """The table of these tests is filled by hand."""


class _Audit:
    """Keeps the refusals that are reported."""

    def __init__(self, kept: list[dict[str, Any]]) -> None:
        self._kept = kept

    async def report(self, refusals: list[dict[str, Any]]) -> None:
        """See AuditSink."""
        self._kept += refusals

    async def aclose(self) -> None:
        """See AuditSink."""


class Edge:
    """Everything of one activator, over real loopback HTTP."""

    def __init__(
        self,
        directory: Path,
        settings: ActivatorSettings,
        behaviour: Behaviour,
        quotas: QuotaStore | None = None,
        *,
        fleet: Fleet | None = None,
        leases: InstanceLeases | None = None,
        health: Health | None = None,
        dashboard: DashboardHost | None = None,
        controller: Endpoint | None = None,
        token: str = "",
        unread_s: float = UNREAD_S,
        shared: SharedResponses | None = None,
        issuers: Sequence[IssuerClient] = (),
    ) -> None:
        """`fleet`: another than the fake one; then that has nothing to do. `shared`: answers that
        response caches share with others. `issuers`: those whose tokens call functions.

        Attributes:
            breaker: the terms of throttlers that are made from now on.
            later_s: what the clock of response caches, and of tokens, is ahead."""
        self.breaker = BreakerTerms()
        self.later_s = 0.0
        self.directory = directory
        self.table = empty_table()
        self.fleet = FakeFleet(directory, behaviour)
        self.instances: Fleet = fleet or self.fleet
        self.ledger = MemoryLedger()
        self.metrics = Metrics()
        self.books = BillingService(
            directory=directory / "journal",
            activator="a-0",
            sync_s=0.01,
            free_idle_s=60.0,
            ledger=self.ledger,
            is_served_unbilled=settings.journal_full == "serve",
            observer=self.metrics,
        )
        self.queue = GlobalQueue(settings.max_queued)
        self.strangers = UnauthenticatedRateLimiter(rate_per_s=settings.unauthenticated_per_s)
        self.gate = StartAdmission(self.table, leases=leases)
        self.provisioner = InstanceProvisioner(
            self.instances, secret_env=self.table.secrets.env_of, gate=self.gate
        )
        self.scaler = AutoscalerLoop(
            table=self.table,
            fleet=self.instances,
            make_throttler=self._throttler,
            gate=self.gate,
        )
        self.reconciler = InstanceReconciler(
            table=self.table, fleet=self.instances, scaler=self.scaler
        )
        self.handovers = CutoverTracker(
            throttler_of=self.scaler.throttler_of, finish=self.table.handed_over
        )
        self.runner = runner = CallRunner(
            throttler_of=self.scaler.throttler_of, may_pay=self.books.check
        )
        self.arguments = ArgumentChecker(deadline_s=settings.argument_check_s)
        self.answers = ResponseStore(settings.response_cache_bytes)
        runner.fallbacks = FallbackChain(
            routes=self.table,
            throttler_of=self.scaler.throttler_of,
            answers=self.answers,
            arguments=self.arguments,
        )
        self.metrics.response_caches.sizes = self.answers.sizes
        self.flights = SingleFlight(self.queue)
        self.cached = CachedCalls(
            runner=runner,
            store=self.answers,
            flights=self.flights,
            account=CacheHitAccount(
                self.books.journal, self.books.budgets, on_unbilled=self.books.on_unbilled
            ),
            observer=self.metrics.response_caches,
            shared=shared,
            clock=lambda: time.monotonic() + self.later_s,
        )
        self.table.on_budget = self.books.budgets.apply
        controller = controller or Endpoint.at(directory / "controller.sock")
        self.control = ControlPlaneProxy(
            controller,
            table=self.table,
            visitors=TEST_KEY.visitors,
            unauthenticated=self.strangers,
            catch_up=_nothing_to_catch_up,
            limits=ProxyLimits(
                body_pause_s=settings.body_timeout_s,
                stranger_connections=settings.stranger_connections,
                unread_s=unread_s,
            ),
        )
        self.quotas = quotas or ProcessQuotas()
        self.entrance = AccessCache(table=self.table, store=self.quotas, settings=settings)
        self.traces: list[Json] = []
        self.keep: Callable[[Json], None] = self.traces.append
        self.tracer = Tracer(
            share=settings.traces_sampled,
            keep=self._kept,
            exemplars=self.metrics,
            activator="a-0",
        )
        self.calls = AsyncCalls(
            billing=self.books,
            runner=runner,
            table=self.table,
            access=self.entrance,
            remote=RemoteCalls(control=self.control, controller=controller, token="t"),
            settings=settings,
            metrics=self.metrics,
            tracer=self.tracer,
        )
        self.table.on_tenant_deleted = self.calls.end_tenant
        self.limits = ConnectionLimits[ClientConnection](
            max_per_address=settings.max_connections_per_address,
            max_head_bytes=settings.max_header_bytes,
            head_timeout_s=settings.header_timeout_s,
        )
        resolver = RequestResolver(
            table=self.table, access=self.entrance, unauthenticated=self.strangers
        )
        self.tokens = TokenCallers(
            issuers,
            table=self.table,
            unauthenticated=self.strangers,
            clock=lambda: time.time() + self.later_s,
        )
        self.table.tokens = self.tokens if issuers else None
        tokens = TokenAuthentication(resolver)
        bodies = Bodies(
            limit_bytes=settings.waiting_bytes, tenant_bytes=settings.tenant_waiting_bytes
        )
        self.idempotency = Idempotency(
            ProcessIdempotency(),
            resolver=resolver,
            ttl_s=settings.idempotency_ttl_s,
            body_timeout_s=settings.body_timeout_s,
            bodies=bodies,
        )
        self.refused: list[dict[str, Any]] = []
        self.refusals = RefusalReporter(self.metrics.language, _Audit(self.refused))
        runner.guard = Guards(
            CheckTerms(
                checker=self.arguments,
                function=GuardFunctionClient(
                    runner=runner,
                    table=self.table,
                    access=self.entrance,
                    arguments=self.arguments,
                    metrics=self.metrics,
                    max_depth=settings.max_call_depth,
                    deadline_s=settings.guard_deadline_s,
                ),
                recorder=self.refusals,
                is_open=settings.guard_on_error == "allow",
            )
        )
        self.observers: list[CallObserver] = [self.tracer]
        pipeline = CallPipeline(
            runner=runner,
            writer=ResponseWriter(
                metrics=self.metrics,
                log_answer=runner.log_answer,
                observers=self.observers,
                heartbeat_s=settings.heartbeat_s,
            ),
            arguments=self.arguments,
            tracer=self.tracer,
            body_timeout_s=settings.body_timeout_s,
            cached=self.cached,
        )
        http_proxy = HttpProxy(
            runner=runner,
            metrics=self.metrics,
            tracer=self.tracer,
            body_timeout_s=settings.body_timeout_s,
        )
        openai = OpenAI(
            settings=settings,
            resolver=resolver,
            runner=runner,
            forward_raw=http_proxy.http,
            send=pipeline.writer.answer,
            tracer=self.tracer,
            cached=self.cached,
        )
        self.functions = FunctionsApi(
            settings=settings,
            resolver=resolver,
            pipeline=pipeline,
            openai=openai,
            calls=self.calls,
            warm_up=WarmUp(fleet=self.instances, throttler_of=self.scaler.throttler_of),
            counters_of=self.metrics.warm_counters,
            bindings=BindingsApi(
                self.control, token="token", body_timeout_s=settings.body_timeout_s
            ),
        )
        apis = Apis(
            resolver=resolver,
            functions=self.functions,
            openai=openai,
            models=OpenInferenceApi(
                settings=settings,
                resolver=resolver,
                run=pipeline.run_whole,
                arguments=self.arguments,
            ),
            http_proxy=http_proxy,
            calls=self.calls,
            control=self.control,
            health=HealthApi(health or Health(), control=self.control, table=self.table),
        )
        self.gateway = Gateway(
            apis=apis,
            pipeline=pipeline,
            metrics=self.metrics,
            bodies=bodies,
            middleware=(
                *((dashboard,) if dashboard is not None else ()),
                CrossOrigin(self.table),
                *((tokens,) if issuers else ()),
                self.idempotency,
            ),
            dashboard=dashboard,
            forwarded=ForwardedCallers(settings.trusted_proxies, token=token)
            if settings.trusted_proxies or token
            else None,
        )
        self.sockets = InstanceSockets(
            CallsByFunctions(self.gateway, max_depth=settings.max_call_depth),
            max_per_tenant=settings.max_connections_per_address,
            max_head_bytes=settings.max_header_bytes,
            head_timeout_s=settings.header_timeout_s,
        )
        self._seq = 0
        self.url = ""
        self.client = httpx.AsyncClient(timeout=PATIENCE_S, verify=NO_TLS)
        self.add_key(KEY)

    def stop_the_clock_of_strangers(self) -> None:
        """None of their attempts comes back, however long a test takes."""
        guard, check = self.strangers.guard, self.strangers.check
        self.strangers.guard = lambda address, _: guard(address, 1.0)  # type: ignore[method-assign, assignment]
        self.strangers.check = lambda address, _: check(address, 1.0)  # type: ignore[method-assign, assignment]

    def copy_calls(self, shadows: ShadowTraffic) -> None:
        """Copy all later calls to `shadows`."""
        self.gateway.warm.shadows = shadows
        self.observers.append(shadows)

    def log_calls(self, queue: PredictionQueue) -> None:
        """Give later calls of functions with a prediction log to `queue`."""
        self.runner.predictions = queue

    def _kept(self, trace: Json) -> None:
        self.keep(trace)

    def _throttler(self, target: CallTarget) -> Throttler:
        make = Throttler if target.spec.engine is None else EngineThrottler
        return make(
            target,
            provisioner=self.provisioner,
            queue=self.queue,
            account=self.books.account,
            observer=self.metrics,
            listen=self.sockets.listen,
            terms=self.breaker,
        )

    def tell(self, kind: str, key: str, value: object) -> None:
        """One change of the feed."""
        self._seq += 1
        self.table.apply(FeedChange(seq=self._seq, kind=kind, key=key, value=value))

    def add_key(
        self,
        key: str,
        *,
        scope: str = "deploy",
        tenant: str = TENANT,
        environment: str | None = None,
        **more: object,
    ) -> None:
        """A valid API key; `more`: `app`, `function`, `quotas`, `expires_at`."""
        digest = hashlib.sha256(key.encode()).hexdigest()
        record = {
            "id": f"k-{key}",
            "hash": digest,
            "tenant": tenant,
            "scope": scope,
            "environment": environment,
            **more,
        }
        self.tell("key", f"k-{key}", record)

    def add_tenant(
        self,
        name: str,
        *,
        tenant: str = TENANT,
        suspended: bool = False,
        deleted: bool = False,
        **plan: object,
    ) -> None:
        """A tenant and what its plan says."""
        record = {
            "id": tenant,
            "name": name,
            "uid": None,
            "plan": plan and {"name": "p", **plan},
            "suspended": suspended or deleted,
        }
        if deleted:
            record["deleted"] = True
        self.tell("tenant", tenant, record)

    def add(self, route: FunctionRoute) -> None:
        """A deployed function."""
        self._seq += 1
        self.table.apply(change(self._seq, route))

    async def call(
        self, path: str = "shop/hello:invoke", *, key: str = KEY, **more: object
    ) -> httpx.Response:
        """`POST /v1/functions/{path}`."""
        headers = {"authorization": f"Bearer {key}", **more.pop("headers", {})}  # type: ignore[dict-item]
        return await self.client.post(f"{self.url}/v1/functions/{path}", headers=headers, **more)  # type: ignore[arg-type]

    async def settle(self) -> dict[str, UsageRecord]:
        """The ledger's records once everything closed was shipped, those of starts left out."""
        await self.books.shipper.flush()
        return {
            key: record for key, record in self.ledger.records.items() if record.kind != "START"
        }

    def starts(self) -> list[UsageRecord]:
        """The ledger's records of starts, as of the last `settle`."""
        return [record for record in self.ledger.records.values() if record.kind == "START"]


@pytest.fixture(name="head_clock_s")
def _head_clock_s() -> float:
    """How long a head may take; short only where a test shows one that takes longer."""
    return PATIENCE_S


@pytest.fixture(name="body_clock_s")
def _body_clock_s() -> float:
    """The same of a body."""
    return PATIENCE_S


@pytest.fixture(name="settings")
def _settings(head_clock_s: float, body_clock_s: float) -> ActivatorSettings:
    return ActivatorSettings(
        max_body_bytes=1000,
        body_timeout_s=body_clock_s,
        header_timeout_s=head_clock_s,
        max_header_bytes=4000,
        unauthenticated_per_s=5.0,
    )


@pytest.fixture(name="script")
def _script() -> Script:
    """What workers do, where the test changes it between calls."""
    return Script()


@pytest.fixture(name="behaviour")
def _behaviour(script: Script) -> Behaviour:
    return script


@pytest.fixture(name="quota_store")
def _quota_store() -> QuotaStore:
    return ProcessQuotas()


@pytest.fixture(name="token")
def _token() -> str:
    """The platform's, which other activators send; "" = there is none."""
    return ""


@pytest.fixture(name="unread_s")
def _unread_s() -> float:
    """How long a caller may leave an answer of the controller unread."""
    return UNREAD_S


@pytest.fixture(name="edge")
async def _edge(
    short_tmp: Path,
    settings: ActivatorSettings,
    behaviour: Behaviour,
    quota_store: QuotaStore,
    *,
    token: str,
    unread_s: float,
) -> AsyncIterator[Edge]:
    async with served(
        Edge(short_tmp, settings, behaviour, quota_store, token=token, unread_s=unread_s)
    ) as edge:
        yield edge


@asynccontextmanager
async def served(edge: Edge) -> AsyncIterator[Edge]:
    """It, behind a port of its own and a Unix socket, until the context ends."""
    listener, at_unix = (
        socket.create_server(("127.0.0.1", 0)),
        open_functions_socket(edge.directory / "http.sock"),
    )
    edge.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = server_config(edge.gateway, edge.limits, ActivatorSettings(shutdown_s=1.0))
    server = QuietServer(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listener, at_unix])
    tasks = [
        asyncio.create_task(edge.books.run(), name="books"),
        asyncio.create_task(edge.reconciler.watch(), name="agent events"),
        asyncio.create_task(edge.limits.sweep(), name="slow heads"),
    ]
    yield edge
    await edge.client.aclose()
    await server.shutdown(sockets=[listener, at_unix])
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await edge.calls.aclose()
    await edge.sockets.aclose()
    await edge.handovers.aclose()  # it would start instances for ever
    await edge.scaler.aclose()
    await edge.control.aclose()
    await edge.tokens.aclose()
    await edge.arguments.aclose()
    await edge.fleet.aclose()
    await edge.books.aclose()


@pytest.fixture(name="controller")
async def _controller(short_tmp: Path) -> Any:
    controller = await FakeController(short_tmp / "controller.sock").start()
    yield controller
    await controller.aclose()


@pytest.fixture(name="shipping")
async def _shipping(edge: Edge) -> Any:
    async with asyncio.TaskGroup() as group:
        tasks = edge.calls.start(group)
        yield tasks
        for task in tasks:
            task.cancel()
