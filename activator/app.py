"""Builds the objects of one activator from its settings, in dependency order. Nothing runs yet.

Each small function builds one group of objects. Background loops are appended to `loops`, objects
that must be closed at shutdown to `closing`; `activator.lifecycle` starts and ends
them through these lists."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from activator import shared_stores
from activator.access.grants import AccessCache
from activator.access.resolver import RequestResolver
from activator.arguments.checker import ArgumentChecker
from activator.async_calls.api import RemoteCalls
from activator.async_calls.schedule_poller import SchedulePoller
from activator.async_calls.service import AsyncCalls
from activator.autoscaler.autoscaler_loop import AutoscalerLoop
from activator.autoscaler.instance_reconciler import InstanceReconciler
from activator.autoscaler.warm_up import WarmUp
from activator.balancing.cutover import CutoverTracker
from activator.balancing.fleet import NodeFleet
from activator.balancing.global_queue import GlobalQueue
from activator.balancing.instance_lifecycle import InstanceProvisioner
from activator.balancing.throttler import Throttler
from activator.billing.service import BillingService, ControllerLedger
from activator.call_stats.shipper import ControllerReceiver, StatsShipper
from activator.calls.fallback import FallbackChain
from activator.calls.response_store import ResponseStore
from activator.calls.runner import CallRunner
from activator.cluster_app import ClusterApp
from activator.context import ActivatorContext
from activator.control_plane.bindings import BindingsApi
from activator.control_plane.customer_budgets import ControllerRegistrar
from activator.control_plane.function_storage import FunctionStorage
from activator.control_plane.proxy import ControlPlaneProxy, ProxyLimits
from activator.coordination.peers import ActivatorPeers, peer_addresses
from activator.fairness.share_policy import share_of
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
from activator.guards.refusals import ControllerAudit, RefusalReporter
from activator.http.bodies import Bodies
from activator.http.connection_limits import ConnectionLimits
from activator.http.dashboard_host import DashboardHost
from activator.http.server import ClientConnection
from activator.idempotency.middleware import Idempotency
from activator.llm.engine_scraper import EngineScraper
from activator.llm.engine_throttler import EngineTerms, EngineThrottler
from activator.llm.openai.api import OpenAI
from activator.metrics.metrics import Metrics
from activator.open_inference.api import OpenInferenceApi
from activator.open_inference.grpc.process import GrpcProcess, GrpcSockets
from activator.prediction_log.pipeline import PredictionLogs
from activator.quotas.process_store import ProcessQuotas
from activator.quotas.unauthenticated_limit import (
    SharedUnauthenticatedLimit,
    UnauthenticatedRateLimiter,
)
from activator.resilience.breaker import BreakerTerms
from activator.resilience.node_breaker import NodeBreaker
from activator.response_cache.cache_hits import CacheHitAccount
from activator.response_cache.cached_calls import CachedCalls
from activator.response_cache.single_flight import SingleFlight
from activator.routing.config_feed import ConfigWatcher
from activator.routing.route_table import CallTarget, RouteTable
from activator.settings import ActivatorSettings
from activator.tracing.pipeline import TracePipeline
from pilotlight.core.dashboard.dashboard_origin import DashboardOrigin
from pilotlight.core.oidc.settings import Issuer
from pilotlight.core.transport.endpoint import TlsCredentials
from pilotlight.core.transport.listeners import open_tcp_listener, require_tls_or_loopback
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.pricing import PriceSettings

if TYPE_CHECKING:
    from activator.tokens.token_authentication import TokenAuthentication


class ActivatorApp:
    """The objects of one activator. Owner: the event loop of its process, once it runs.

    Attributes:
        loops: background loops: (name of the task, factory of its coroutine). Started once the
            routes and budgets are known, cancelled once the last request was answered.
        closing: closed after the loops, in this order.
        early_loops: like `loops`, but started before this activator looks for the instances that it
            leases.
    """

    def __init__(
        self,
        *,
        settings: ActivatorSettings,
        prices: PriceSettings,
        context: ActivatorContext,
        cluster: ClusterSettings | None = None,
        dashboard: DashboardOrigin | None = None,
        issuers: Mapping[str, Issuer] | None = None,
        grpc: GrpcSockets | None = None,
    ) -> None:
        """`cluster`: set where instances are pods (`platform.fleet: knative`); None = instances run
        on this machine. `grpc`: of the Open Inference Protocol over gRPC; None = it is off.

        `dashboard`: the dashboard's own origin; None = it shares the one URL. `issuers`: those that
        the operator trusts, by name.

        Raises SettingsInvalid, JournalInUse, JournalFull.
        """
        self.settings = settings
        self._dashboard = dashboard
        self._issuers = issuers or {}
        self._grpc = grpc
        self._is_local = cluster is None
        self.early_loops: list[tuple[str, Callable[[], Coroutine[Any, Any, None]]]] = []
        self.context = context
        self.loops: list[tuple[str, Callable[[], Coroutine[Any, Any, None]]]] = []
        self.closing: list[Callable[[], Awaitable[None]]] = []
        self.metrics = Metrics(series=settings.metrics_series)
        self._make_call_stats()
        self._make_tracing()
        self._make_routing(prices)
        self._make_billing()
        self._make_shared()
        self.cluster = self._cluster_app(cluster) if cluster is not None else None
        self._make_scaler()
        self._make_runner()
        self._make_async_calls()
        self._make_shadow_traffic()
        self._make_prediction_log()
        self._make_guards()
        self._make_gateway()

    def _make_call_stats(self) -> None:
        receiver = ControllerReceiver(
            controller=self.context.controller, token=self.context.key.token
        )
        self.stats = StatsShipper(self.metrics.observer, receiver, activator=self.context.id)
        self.loops.append(("observations", self.stats.run))
        self.closing.append(self.stats.aclose)

    def _make_tracing(self) -> None:
        settings, context = self.settings, self.context
        self.traces = TracePipeline(
            share=settings.traces_sampled,
            controller=context.controller,
            token=context.key.token,
            activator=context.id,
            endpoint=settings.otlp_endpoint,
            exemplars=self.metrics,
        )
        self.traces.collect(self.metrics.registry)
        self.loops.append(("traces", self.traces.run))
        self.closing.append(self.traces.aclose)

    def _make_routing(self, prices: PriceSettings) -> None:
        settings, context = self.settings, self.context
        self.table = RouteTable(prices.lists(), context.key.secrets)
        self.metrics.collect_tenants(self.table.tenants.names)
        self.quotas = shared_stores.quota_store(settings, context)
        self.access = AccessCache(table=self.table, store=self.quotas, settings=settings)
        self.feed = ConfigWatcher(
            table=self.table,
            controller=context.controller,
            token=context.key.token,
            log_path=context.home / "routes.ndjson",
            needs_seals=self._is_local,
        )
        if not isinstance(self.quotas, ProcessQuotas):
            from activator.quotas.redis_store import RedisQuotas

            assert isinstance(self.quotas, RedisQuotas)
            self.loops.append(("quotas", self.quotas.run))

    def _make_billing(self) -> None:
        settings, context = self.settings, self.context
        self.billing = BillingService(
            directory=context.home,
            activator=context.id,
            sync_s=settings.journal_sync_s,
            free_idle_s=settings.scaledown_window_s,
            ledger=ControllerLedger(
                controller=context.controller, token=context.key.token, activator=context.id
            ),
            shared=shared_stores.shared_budgets(settings, context),
            is_served_unbilled=settings.journal_full == "serve",
            observer=self.metrics,
        )
        self.health = Health(
            journal=self.billing.journal, is_served_unbilled=settings.journal_full == "serve"
        )
        self.table.on_budget = self.billing.budgets.apply
        self.metrics.collect_journal(self.billing.lag)

    def _make_shared(self) -> None:
        settings, context = self.settings, self.context
        self.shared = shared = shared_stores.shared_state(settings, context)
        if shared is not None:
            self.health.needs(
                lambda: (
                    ""
                    if shared.is_member
                    else "this activator has not joined the others in Redis yet"
                )
            )
        rate_per_s = settings.unauthenticated_per_s
        self.unauthenticated = (
            SharedUnauthenticatedLimit(self.shared, rate_per_s=rate_per_s)
            if self.shared
            else UnauthenticatedRateLimiter(rate_per_s=rate_per_s)
        )
        self.sibling_listener, self.siblings = None, None
        if settings.sibling_listen is not None:
            self.sibling_listener = _sibling_listener(settings.sibling_listen, context)
        if self.shared is not None:
            place = peer_addresses(context.paths.run, settings.sibling_url, context.credentials)
            self.siblings = ActivatorPeers(
                place,
                index=context.index,
                count=settings.activators,
                members=self.shared.members,
                token=context.key.token,
            )

    def _make_scaler(self) -> None:
        self.fleet = self._local_fleet() if self.cluster is None else self.cluster.fleet
        self.queue = GlobalQueue(self.settings.max_queued)
        self.metrics.collect_waiting(self.queue.counts)
        self.gate = StartAdmission(self.table, leases=self.shared)
        self.provisioner = InstanceProvisioner(
            self.fleet, secret_env=self.table.secrets.env_of, gate=self.gate
        )
        self.scaler = AutoscalerLoop(
            table=self.table,
            fleet=self.fleet,
            make_throttler=self._make_throttler,
            gate=self.gate,
            may_run=lambda target: not self.billing.is_spent(target),
            occupancy=self.metrics.batches.occupancy,
            freeze_idle_s=self.settings.freeze_idle_s,
        )
        self.reconciler = InstanceReconciler(table=self.table, fleet=self.fleet, scaler=self.scaler)
        self.health.needs(
            lambda: (
                ""
                if self.scaler.reconciled.is_set()
                else "still looking for the instances that this activator leases"
            )
        )
        self.metrics.collect_instances(self.scaler.states)
        self.engines = EngineScraper(
            self.scaler.throttlers,
            every_s=self.settings.engine_scrape_s,
            seen=self.metrics.engine_seen,
        )
        self.metrics.language.collect_engines(self.engines.known)
        self.loops.append(("engines", self.engines.run))
        self.cutovers = self.table.handovers = CutoverTracker(
            throttler_of=self.scaler.throttler_of, finish=self.table.handed_over
        )

    def _cluster_app(self, cluster: ClusterSettings) -> ClusterApp:
        parts = ClusterApp(
            cluster,
            context=self.context,
            settings=self.settings,
            shared=self.shared,
            table=self.table,
            scaler=lambda: self.scaler,
        )
        if (autoscaler := parts.autoscaler) is not None:
            self.metrics.collect_autoscaler(lambda: autoscaler.leader is not None)
        self.early_loops += parts.early_loops
        self.loops += parts.loops
        self.closing += parts.closing
        return parts

    def _local_fleet(self) -> NodeFleet:
        return NodeFleet(
            socket=self.context.paths.socket("snapshotter"),
            lessee=self.context.id,
            share_of=lambda tenant: share_of(self.table, tenant),
            guard=NodeBreaker(_breaker_terms(self.settings)),
        )

    def _make_throttler(self, target: CallTarget) -> Throttler:
        make: Callable[..., Throttler] = Throttler
        if target.spec.language_model is not None:
            make = partial(
                EngineThrottler,
                engine_terms=EngineTerms(
                    kv_target=self.settings.engine_kv_use, load=self.settings.affinity_load
                ),
            )
        return make(
            target,
            provisioner=self.provisioner,
            queue=self.queue,
            observer=self.metrics,
            account=self.billing.account,
            terms=_breaker_terms(self.settings),
            listen=self.sockets.listen,
        )

    def _make_runner(self) -> None:
        settings, throttler_of = self.settings, self.scaler.throttler_of
        self.runner = CallRunner(
            throttler_of=throttler_of,
            may_pay=self.billing.check,
            retry_budget=settings.retry_budget,
        )
        self.arguments = ArgumentChecker(deadline_s=settings.argument_check_s)
        self.closing.append(self.arguments.aclose)
        answers = ResponseStore(settings.response_cache_bytes)
        self.runner.fallbacks = FallbackChain(
            routes=self.table,
            throttler_of=throttler_of,
            answers=answers,
            arguments=self.arguments,
        )
        self._make_response_cache(answers)

    def _make_response_cache(self, answers: ResponseStore) -> None:
        metrics = self.metrics.response_caches
        metrics.sizes = answers.sizes
        shared = shared_stores.shared_responses(self.settings, self.context)
        if shared is not None:
            metrics.shared_failures = lambda: shared.failures
            self.closing.append(shared.aclose)
        self.cached = CachedCalls(
            runner=self.runner,
            store=answers,
            flights=SingleFlight(self.queue),
            account=CacheHitAccount(
                self.billing.journal, self.billing.budgets, on_unbilled=self.billing.on_unbilled
            ),
            observer=metrics,
            shared=shared,
        )

    def _make_async_calls(self) -> None:
        context = self.context
        self.control = ControlPlaneProxy(
            context.controller,
            table=self.table,
            visitors=context.key.visitors,
            unauthenticated=self.unauthenticated,
            catch_up=self.feed.catch_up,
            others_catch_up=self.siblings.catch_up if self.siblings is not None else None,
            limits=ProxyLimits(
                body_pause_s=self.settings.body_timeout_s,
                stranger_connections=self.settings.stranger_connections,
            ),
        )
        self.billing.budgets.registrar = ControllerRegistrar(self.control, token=context.key.token)
        self.calls = AsyncCalls(
            billing=self.billing,
            runner=self.runner,
            table=self.table,
            access=self.access,
            remote=RemoteCalls(
                control=self.control,
                controller=context.controller,
                token=context.key.token,
                siblings=self.siblings,
            ),
            settings=self.settings,
            metrics=self.metrics,
            tracer=self.traces.tracer,
        )
        self.table.on_tenant_deleted = self.calls.end_tenant
        self.schedule_poller = SchedulePoller(
            self.calls, controller=context.controller, token=context.key.token, activator=context.id
        )
        self.loops.append(("due calls", self.schedule_poller.run))
        self.loops.append(("metrics", lambda: self.metrics.sweep(self.table.functions.deployed)))
        self.closing.append(self.schedule_poller.aclose)

    def _make_shadow_traffic(self) -> None:
        self.shadows = ShadowTraffic(
            throttler_of=self.scaler.throttler_of,
            observer=self.metrics.observer,
            is_crowded=lambda: any(self.gate.waiting) or self.queue.waiting > 0,
            tracer=self.traces.tracer,
        )
        self.closing.append(self.shadows.aclose)

    def _make_prediction_log(self) -> None:
        context, settings = self.context, self.settings
        self.predictions = PredictionLogs(
            directory=context.home / "predictions",
            controller=context.controller,
            token=context.key.token,
            max_bytes=settings.prediction_log_bytes,
            ship_s=settings.prediction_log_ship_s,
        )
        self.runner.predictions = self.predictions.queue
        self.metrics.registry.register(self.predictions)
        self.loops.append(("predictions", self.predictions.run))
        self.closing.append(self.predictions.aclose)

    def _make_guards(self) -> None:
        context, settings = self.context, self.settings
        refusals = RefusalReporter(
            self.metrics.language,
            ControllerAudit(controller=context.controller, token=context.key.token),
        )
        functions = GuardFunctionClient(
            runner=self.runner,
            table=self.table,
            access=self.access,
            arguments=self.arguments,
            metrics=self.metrics,
            max_depth=settings.max_call_depth,
            deadline_s=settings.guard_deadline_s,
        )
        self.runner.guard = Guards(
            CheckTerms(
                checker=self.arguments,
                function=functions,
                recorder=refusals,
                is_open=settings.guard_on_error == "allow",
            )
        )
        self.loops.append(("guard refusals", refusals.run))
        self.closing.append(refusals.aclose)

    def _make_gateway(self) -> None:
        settings = self.settings
        self.limits = ConnectionLimits[ClientConnection](
            max_per_address=settings.max_connections_per_address,
            max_head_bytes=settings.max_header_bytes,
            head_timeout_s=settings.header_timeout_s,
        )
        resolver = RequestResolver(
            table=self.table, access=self.access, unauthenticated=self.unauthenticated
        )
        bodies = Bodies(
            limit_bytes=settings.waiting_bytes, tenant_bytes=settings.tenant_waiting_bytes
        )
        self.idempotency = Idempotency(
            shared_stores.idempotency_store(settings, self.context),
            resolver=resolver,
            ttl_s=settings.idempotency_ttl_s,
            body_timeout_s=settings.body_timeout_s,
            bodies=bodies,
        )
        dashboard = DashboardHost(self._dashboard) if self._dashboard is not None else None
        tokens = self._token_authentication(resolver)
        pipeline = self._pipeline(self.traces.tracer, self.shadows)
        self.gateway = Gateway(
            apis=self._apis(resolver, pipeline),
            pipeline=pipeline,
            metrics=self.metrics,
            bodies=bodies,
            shadows=self.shadows,
            # features that are not steps of a call, in their order
            middleware=(
                *((dashboard,) if dashboard is not None else ()),
                CrossOrigin(self.table),
                *((tokens,) if tokens is not None else ()),
                self.idempotency,
            ),
            dashboard=dashboard,
            forwarded=self._forwarded(),
        )
        self.closing.append(self.idempotency.aclose)
        self._make_sockets()

    def _token_authentication(self, resolver: RequestResolver) -> TokenAuthentication | None:
        """Return what verifies tokens of issuers; None where none of them has callers."""
        trusted = [one for one in self._issuers.values() if one.callers]
        if not trusted:
            return None
        # most platforms have none, and start without the library
        from activator.tokens.token_authentication import TokenAuthentication
        from activator.tokens.token_callers import TokenCallers
        from pilotlight.core.oidc.issuer_client import IssuerClient

        callers = TokenCallers(
            [IssuerClient(issuer) for issuer in trusted],
            table=self.table,
            unauthenticated=self.unauthenticated,
        )
        self.table.tokens = callers
        self.loops.append(("issuers", callers.run))
        self.closing.append(callers.aclose)
        return TokenAuthentication(resolver)

    def _forwarded(self) -> ForwardedCallers | None:
        """Return who is believed about callers; None where no other server forwards requests."""
        token = self.context.key.token if self.siblings is not None else ""
        grpc_token = secrets.token_hex(16) if self._grpc is not None else ""
        if self._grpc is not None:
            self.grpc = GrpcProcess(self._grpc, grpc_token, self.settings)
            self.loops.append(("grpc", self.grpc.run))
        proxies = self.settings.trusted_proxies
        if not (proxies or token or grpc_token):
            return None
        return ForwardedCallers(proxies, token=token, grpc_token=grpc_token)

    def _pipeline(self, *observers: CallObserver) -> CallPipeline:
        settings = self.settings
        writer = ResponseWriter(
            metrics=self.metrics,
            log_answer=self.runner.log_answer,
            observers=observers,
            heartbeat_s=settings.heartbeat_s,
        )
        return CallPipeline(
            runner=self.runner,
            writer=writer,
            arguments=self.arguments,
            tracer=self.traces.tracer,
            body_timeout_s=settings.body_timeout_s,
            cached=self.cached,
        )

    def _apis(self, resolver: RequestResolver, pipeline: CallPipeline) -> Apis:
        settings = self.settings
        http_proxy = HttpProxy(
            runner=self.runner,
            metrics=self.metrics,
            tracer=self.traces.tracer,
            body_timeout_s=settings.body_timeout_s,
        )
        openai = OpenAI(
            settings=settings,
            resolver=resolver,
            runner=self.runner,
            forward_raw=http_proxy.http,
            send=pipeline.writer.answer,
            tracer=self.traces.tracer,
            cached=self.cached,
        )
        functions = FunctionsApi(
            settings=settings,
            resolver=resolver,
            pipeline=pipeline,
            openai=openai,
            calls=self.calls,
            warm_up=WarmUp(fleet=self.fleet, throttler_of=self.scaler.throttler_of),
            counters_of=self.metrics.warm_counters,
            bindings=BindingsApi(
                self.control,
                token=self.context.key.token,
                body_timeout_s=settings.body_timeout_s,
            ),
        )
        models = OpenInferenceApi(
            settings=settings,
            resolver=resolver,
            run=pipeline.run_whole,
            arguments=self.arguments,
        )
        return Apis(
            resolver=resolver,
            functions=functions,
            openai=openai,
            models=models,
            http_proxy=http_proxy,
            calls=self.calls,
            control=self.control,
            health=HealthApi(self.health, control=self.control, table=self.table),
        )

    def _make_sockets(self) -> None:
        settings = self.settings
        self.sockets = InstanceSockets(
            CallsByFunctions(
                self.gateway, max_depth=settings.max_call_depth, storage=self._storage()
            ),
            max_per_tenant=settings.max_connections_per_address,
            max_head_bytes=settings.max_header_bytes,
            head_timeout_s=settings.header_timeout_s,
        )
        self.loops.append(("slow heads of functions", self.sockets.limits.sweep))
        if self.cluster is not None and settings.agents_listen is not None:
            self.loops.append(("calls of pods", self.cluster.pod_connections(self.sockets).run))

    def _storage(self) -> FunctionStorage:
        storage = FunctionStorage(
            self.context.controller,
            token=self.context.key.token,
            mounts_volumes=self._is_local,
            operations=self.access.operations,
        )
        self.closing.append(storage.aclose)
        return storage


def _breaker_terms(settings: ActivatorSettings) -> BreakerTerms:
    return BreakerTerms(
        error_ratio=settings.breaker_error_ratio,
        min_calls=settings.breaker_min_calls,
        open_s=settings.breaker_open_s,
    )


def _sibling_listener(
    listen: str, context: ActivatorContext
) -> tuple[socket.socket, TlsCredentials | None]:
    """Return the listener for the other activators of a cluster, and our credentials. Raises
    SettingsInvalid."""
    require_tls_or_loopback(
        "activator.sibling_listen", listen, is_known=context.credentials is not None
    )
    return open_tcp_listener("activator.sibling_listen", listen), context.credentials
