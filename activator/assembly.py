"""What one activator is made of, in the order in which it is made: settings in, objects out; nothing runs yet.

Each small function makes one group of parts and says what it needs by what it reads. A part that runs by itself adds itself to `loops`,
one that must be closed at the end to `closing`: the process (`activator.__main__`) starts and ends them without knowing them.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from activator.admission import ProcessQueue, StrangerLimit
from activator.argument_checker import ArgumentChecker
from activator.billing.books import Books, ControllerLedger
from activator.billing.redis_money import RedisMoney
from activator.calls import SubmittedCalls
from activator.census import in_flight, waiting_in
from activator.control import ControlPlane
from activator.dashboard_host import DashboardHost
from activator.dispatch import Dispatcher
from activator.due import DueCalls
from activator.edge import EdgeLimits
from activator.engines.scrape import Scraper
from activator.engines.throttler import EngineTerms, EngineThrottler
from activator.entry import Entrance
from activator.fairness.gate import Gate
from activator.fairness.terms import share_of
from activator.feed import FeedFollower
from activator.fleet import NodeFleet
from activator.gateway import Gateway
from activator.handover import Handovers, StartsSeen
from activator.health import Health
from activator.idempotency.process import ProcessIdempotency
from activator.idempotency.redis_store import RedisIdempotency
from activator.idempotency.store import IdempotencyStore
from activator.knative.access import LateCluster
from activator.knative.autoscaler.speaker import loads_of
from activator.knative.autoscaler.statements import Statement
from activator.knative.fleet import KnativeFleet
from activator.knative.wiring import Surroundings, cluster_parts
from activator.metrics import Metrics
from activator.observing.posting import ControllerReceiver, Posting
from activator.passthrough import Passthrough
from activator.quotas.process import ProcessQuotas
from activator.quotas.redis_store import RedisQuotas
from activator.quotas.store import QuotaStore
from activator.resilience.breaker import BreakerTerms
from activator.resilience.ladder import Ladder
from activator.resilience.nodes import NodeGuard
from activator.routes import RouteTable, Target
from activator.scaler import Scaler
from activator.settings import ActivatorSettings
from activator.shadows import Shadows
from activator.shared.redis_state import RedisState, platform_id
from activator.shared.strangers import SharedStrangerLimit
from activator.siblings import Siblings, places, socket_of
from activator.throttler import Throttler
from activator.tracing.desk import TraceDesk
from pilotlight.addresses import check_listen, tcp_listener
from pilotlight.cluster.settings import ClusterSettings
from pilotlight.dashboard_origin import DashboardOrigin
from pilotlight.pricing import PriceSettings
from pilotlight.seal import ActivatorKey, activator_key_of
from pilotlight.spec import FunctionSpec
from weight_cache.addresses import Address, Credentials, controller_address
from weight_cache.settings import Paths, PlatformSettings, SettingsInvalid

if TYPE_CHECKING:
    from activator.knative.autoscaler.wiring import Autoscaler


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where an activator lives and who it is.

    Attributes:
        id: its name among the activators: `a-0`.
        index: which activator of this machine, from 0.
        home: directory of its journal and its copy of the routes.
        key: the activators' key.
        controller: where the controller is.
        credentials: what we show to other machines; None = there are none.
    """

    id: str
    index: int
    paths: Paths
    home: Path
    key: ActivatorKey
    controller: Address
    credentials: Credentials | None


def site_of(paths: Paths, index: int, platform: PlatformSettings) -> Site:
    """The place of activator `index`; its directory is made. Raises SettingsInvalid."""
    home = paths.home / "activator" / f"a-{index}"
    home.mkdir(parents=True, exist_ok=True)
    key = activator_key_of(platform, paths)
    controller, credentials = controller_address(platform, paths), Credentials.of(platform)
    return Site(id=f"a-{index}", index=index, paths=paths, home=home, key=key, controller=controller, credentials=credentials)


class Assembly:
    """The parts of one activator. Owner: the event loop of its process, once it runs.

    Attributes:
        loops: what runs from start to end beside the server: (name of the task, what makes it). Started once the routes and budgets are
            known, cancelled once the last request was answered.
        closing: closed after the loops, in this order.
        early: like `loops`, but started before the instances that are ours are looked for.
    """

    def __init__(
        self,
        *,
        settings: ActivatorSettings,
        prices: PriceSettings,
        site: Site,
        cluster: ClusterSettings | None = None,
        dashboard: DashboardOrigin | None = None,
    ) -> None:
        """`cluster`: where instances are pods (`platform.fleet: knative`); None = they are this machine's.

        `dashboard`: the origin that the dashboard has of its own; None = it shares the one URL.

        Raises SettingsInvalid, JournalInUse, JournalFull.
        """
        self.settings = settings
        self._cluster = cluster
        self._dashboard = dashboard
        self.early: list[tuple[str, Callable[[], Coroutine[Any, Any, None]]]] = []
        self.site = site
        self.loops: list[tuple[str, Callable[[], Coroutine[Any, Any, None]]]] = []
        self.closing: list[Callable[[], Awaitable[None]]] = []
        self.metrics = Metrics(series=settings.metrics_series)
        self._make_posting()
        self._make_tracing()
        self._make_routes(prices)
        self._make_books()
        self._make_shared()
        self._make_scaler()
        self._make_dispatch()
        self._make_calls()
        self._make_shadows()
        self._make_gateway()

    def _make_posting(self) -> None:
        receiver = ControllerReceiver(controller=self.site.controller, token=self.site.key.token)
        self.posting = Posting(self.metrics.observer, receiver, activator=self.site.id)
        self.loops.append(("observations", self.posting.run))
        self.closing.append(self.posting.aclose)

    def _make_tracing(self) -> None:
        settings, site = self.settings, self.site
        self.traces = TraceDesk(
            share=settings.traces_sampled, controller=site.controller, token=site.key.token, activator=site.id,
            endpoint=settings.otlp_endpoint, exemplars=self.metrics,
        )  # fmt: skip
        self.traces.collect(self.metrics.registry)
        self.loops.append(("traces", self.traces.run))
        self.closing.append(self.traces.aclose)

    def _make_routes(self, prices: PriceSettings) -> None:
        settings, site = self.settings, self.site
        self.table = RouteTable(prices.lists(), site.key.secrets)
        self.metrics.collect_tenants(self.table.tenant_names)
        self.quotas = _quota_store(settings, site)
        self.entrance = Entrance(table=self.table, store=self.quotas, settings=settings)
        self.feed = FeedFollower(table=self.table, controller=site.controller, token=site.key.token, log_path=site.home / "routes.ndjson",
                                 needs_seals=self._cluster is None)  # fmt: skip
        if isinstance(self.quotas, RedisQuotas):
            self.loops.append(("quotas", self.quotas.run))

    def _make_books(self) -> None:
        settings, site = self.settings, self.site
        self.books = Books(
            directory=site.home, activator=site.id, sync_s=settings.journal_sync_s, free_idle_s=settings.scaledown_window_s,
            ledger=ControllerLedger(controller=site.controller, token=site.key.token, activator=site.id),
            money=_shared_money(settings, site), is_open_without_money=settings.is_open_without_redis("budget"),
            is_served_unbilled=settings.journal_full == "serve", on_unbilled=self.metrics.unbilled,
        )  # fmt: skip
        self.health = Health(journal=self.books.journal, is_served_unbilled=settings.journal_full == "serve")
        self.table.on_budget = self.books.budgets.apply
        self.metrics.collect_journal(self.books.lag)

    def _make_shared(self) -> None:
        settings, site = self.settings, self.site
        self.shared = shared = _shared_state(settings, site)
        if shared is not None:
            self.health.needs(lambda: "" if shared.is_member else "it is no member of the activators in Redis yet")
        rate_per_s = settings.unauthenticated_per_s
        self.strangers = SharedStrangerLimit(self.shared, rate_per_s=rate_per_s) if self.shared else StrangerLimit(rate_per_s=rate_per_s)
        self.elsewhere, self.siblings = None, None
        if settings.sibling_listen is not None:
            self.elsewhere = _listener(settings.sibling_listen, site)
        if self.shared is not None:
            place = places(site.paths.run, settings.sibling_url, site.credentials)
            self.siblings = Siblings(place, index=site.index, count=settings.activators, members=self.shared.members)

    def _make_scaler(self) -> None:
        self.fleet = self._local_fleet() if self._cluster is None else self._cluster_fleet(self._cluster)
        self.queue = ProcessQueue(self.settings.max_queued)
        self.metrics.collect_waiting(self.queue.counts)
        self.gate = Gate(self.table)
        self.scaler = Scaler(
            table=self.table, fleet=self.fleet, make_throttler=self._make_throttler, gate=self.gate,
            may_run=lambda target: not self.books.is_spent(target), occupancy=self.metrics.batches.occupancy,
            freeze_idle_s=self.settings.freeze_idle_s,
        )  # fmt: skip
        self.health.needs(lambda: "" if self.scaler.reconciled.is_set() else "instances that are its own are still looked for")
        self.metrics.collect_instances(self.scaler.states)
        self.engines = Scraper(self.scaler.throttlers, every_s=self.settings.engine_scrape_s, seen=self.metrics.engine_seen)
        self.metrics.language.collect_engines(self.engines.known)
        self.loops.append(("engines", self.engines.run))
        self.handovers = self.table.handovers = Handovers(throttler_of=self.scaler.throttler_of, finish=self.table.handed_over)
        self.closing.append(self.handovers.aclose)

    def _local_fleet(self) -> NodeFleet:
        return NodeFleet(
            socket=self.site.paths.socket("snapshotter"), lessee=self.site.id, share_of=lambda tenant: share_of(self.table, tenant),
            guard=NodeGuard(_breaker_terms(self.settings)),
        )  # fmt: skip

    def _cluster_fleet(self, cluster: ClusterSettings) -> KnativeFleet:
        autoscaler = self._autoscaler(cluster) if cluster.autoscaler == "pilotlight" else None
        around = Surroundings(
            member=self.site.id, table=self.table, redis_url=self.settings.redis_url if self.shared is not None else None,
            platform=platform_id(self.site.key.token), demand=None if autoscaler is None else autoscaler.speaker,
            waiting_of=lambda key: waiting_in(self.scaler.active(key)),
            in_flight=lambda: in_flight(self.scaler.throttlers()),
        )  # fmt: skip
        try:
            parts = cluster_parts(cluster, around)
        except ValueError as e:
            raise SettingsInvalid(str(e)) from e
        self.early.append(("cluster", parts.fleet.run))
        self.loops.append(("deletion costs", parts.costs.run))
        self.closing.append(parts.cluster.aclose)
        return parts.fleet

    def _autoscaler(self, cluster: ClusterSettings) -> Autoscaler:
        """Class `pilotlight.dev`: this activator's part, and its candidacy for the one who decides."""
        from activator.knative.autoscaler.wiring import Around, Autoscaler  # a second of imports, for clusters with this class only

        own = LateCluster(cluster)
        around = Around(
            member=self.site.id, redis_url=self.settings.redis_url if self.shared is not None else None,
            platform=platform_id(self.site.key.token), is_known=lambda: self.scaler.reconciled, loads=self._loads,
            pods_of=lambda key: self.fleet.pods.of(key) if isinstance(self.fleet, KnativeFleet) else (), spec_of=self._spec_of,
        )  # fmt: skip
        autoscaler = Autoscaler(cluster, own, around)
        self.loops.append(("autoscaler", autoscaler.run))
        self.closing += [autoscaler.aclose, own.aclose]
        return autoscaler

    def _loads(self) -> Statement:
        held = self.fleet.held() if isinstance(self.fleet, KnativeFleet) else {}
        return loads_of(self.scaler.throttlers(), self.scaler.concurrency(), held, time.monotonic())

    def _spec_of(self, tenant: str, key: str) -> FunctionSpec | None:
        target = self.table.target_keyed(tenant, key)
        return target.spec if target is not None else None

    def _make_throttler(self, target: Target) -> Throttler:
        make: Callable[..., Throttler] = Throttler
        if target.spec.engine is not None:
            make = partial(
                EngineThrottler, engine_terms=EngineTerms(kv_target=self.settings.engine_kv_use, load=self.settings.affinity_load)
            )
        return make(
            target, fleet=self.fleet, queue=self.queue, secret_env=self.table.secret_env, observer=StartsSeen(self.metrics, self.handovers),
            account=self.books.account, allowance=self.shared, gate=self.gate,
            terms=_breaker_terms(self.settings),
        )  # fmt: skip

    def _make_dispatch(self) -> None:
        settings, throttler_of = self.settings, self.scaler.throttler_of
        self.dispatcher = Dispatcher(throttler_of=throttler_of, may_pay=self.books.check, retry_budget=settings.retry_budget)
        self.arguments = ArgumentChecker(deadline_s=settings.argument_check_s)
        self.closing.append(self.arguments.aclose)
        self.dispatcher.fallbacks = Ladder(routes=self.table, throttler_of=throttler_of, arguments=self.arguments)

    def _make_calls(self) -> None:
        site = self.site
        self.control = ControlPlane(
            site.controller, table=self.table, visitors=site.key.visitors, strangers=self.strangers, catch_up=self.feed.catch_up,
            others_catch_up=self.siblings.catch_up if self.siblings is not None else None,
            body_pause_s=self.settings.body_timeout_s, stranger_connections=self.settings.stranger_connections,
        )  # fmt: skip
        self.calls = SubmittedCalls(
            books=self.books, dispatcher=self.dispatcher, table=self.table, entrance=self.entrance, control=self.control,
            settings=self.settings, metrics=self.metrics, controller=site.controller, token=site.key.token, siblings=self.siblings,
            tracer=self.traces.tracer,
        )  # fmt: skip
        self.due = DueCalls(self.calls, controller=site.controller, token=site.key.token, activator=site.id)
        self.loops.append(("due calls", self.due.run))
        self.closing.append(self.due.aclose)

    def _make_shadows(self) -> None:
        self.shadows = Shadows(
            throttler_of=self.scaler.throttler_of, observer=self.metrics.observer,
            is_crowded=lambda: self.gate.is_crowded or self.queue.waiting > 0, tracer=self.traces.tracer,
        )  # fmt: skip
        self.closing.append(self.shadows.aclose)

    def _make_gateway(self) -> None:
        settings = self.settings
        self.limits = EdgeLimits(
            max_per_address=settings.max_connections_per_address,
            max_head_bytes=settings.max_header_bytes,
            head_timeout_s=settings.header_timeout_s,
        )
        self.gateway = Gateway(
            settings=settings, table=self.table, entrance=self.entrance, strangers=self.strangers, dispatcher=self.dispatcher,
            calls=self.calls, scaler=self.scaler,
            passthrough=Passthrough(
                dispatcher=self.dispatcher, metrics=self.metrics, tracer=self.traces.tracer, body_timeout_s=settings.body_timeout_s,
            ),
            control=self.control, metrics=self.metrics, tracer=self.traces.tracer, shadows=self.shadows,
            idempotency=_idempotency_store(settings, self.site), health=self.health, arguments=self.arguments,
            dashboard=DashboardHost(self._dashboard) if self._dashboard is not None else None,
        )  # fmt: skip
        self.closing.append(self.gateway.idempotency.aclose)


def _breaker_terms(settings: ActivatorSettings) -> BreakerTerms:
    return BreakerTerms(error_ratio=settings.breaker_error_ratio, min_calls=settings.breaker_min_calls, open_s=settings.breaker_open_s)


def _listener(listen: str, site: Site) -> tuple[socket.socket, Credentials | None]:
    """Where the other activators of a cluster reach us, and what we show them. Raises SettingsInvalid."""
    check_listen("activator.sibling_listen", listen, is_known=site.credentials is not None)
    return tcp_listener("activator.sibling_listen", listen), site.credentials


def own_socket(settings: ActivatorSettings, site: Site) -> Path | None:
    """Where the other activators of this machine ask this one; None where there are none, or they are on other machines."""
    is_alone = settings.activators == 1 or settings.redis_url is None
    return None if is_alone or settings.sibling_url is not None else socket_of(site.paths.run, site.index)


def _shared_state(settings: ActivatorSettings, site: Site) -> RedisState | None:
    """None for a lone activator: it asks nobody."""
    if settings.activators == 1 or settings.redis_url is None:
        return None
    return RedisState(settings.redis_url, platform=platform_id(site.key.token), member=site.id)


def _quota_store(settings: ActivatorSettings, site: Site) -> QuotaStore:
    """Where quotas are counted. Redis need not be there yet: `activator.without_redis` says what happens until it is."""
    if not settings.counts_in_redis or settings.redis_url is None:
        return ProcessQuotas()
    return RedisQuotas(
        settings.redis_url, platform=platform_id(site.key.token), member=site.id, is_open=settings.is_open_without_redis
    )  # fmt: skip


def _idempotency_store(settings: ActivatorSettings, site: Site) -> IdempotencyStore:
    """Where the answers to repeats are kept: in the process of an activator that is alone."""
    if not settings.counts_in_redis or settings.redis_url is None:
        return ProcessIdempotency(tenant_bytes=settings.idempotency_bytes)
    return RedisIdempotency(
        settings.redis_url, platform=platform_id(site.key.token), sealer=site.key.replies, tenant_bytes=settings.idempotency_bytes,
        total_bytes=settings.idempotency_total_bytes,
    )  # fmt: skip


def _shared_money(settings: ActivatorSettings, site: Site) -> RedisMoney | None:
    """None where no other activator spends from the same budgets."""
    if not settings.counts_in_redis or settings.redis_url is None:
        return None
    return RedisMoney(settings.redis_url, platform=platform_id(site.key.token), member=site.id)
