"""Proofs of section `activator` of platform.yaml: through an activator that serves, and through the
parts that the process makes of its settings."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from activator.__main__ import _settings, listen
from activator.app import ActivatorApp, _breaker_terms
from activator.balancing.outlier_detection import record_outcome
from activator.billing.errors import JournalFull
from activator.billing.segment_log import SegmentLog
from activator.context import load_context, own_socket
from activator.http.trusted_proxies import TrustedProxies
from activator.idempotency.process_store import ProcessIdempotency
from activator.idempotency.store_protocol import Claim
from activator.lifecycle import Activator, server_config
from activator.llm.engine_throttler import EngineTerms, EngineThrottler
from activator.open_inference.grpc.process import GrpcProcess, open_grpc_sockets
from activator.quotas.rules import Rule
from activator.resilience.breaker import Outcome, State
from activator.settings import ActivatorSettings
from pilotlight import errors
from pilotlight.core.crypto import ActivatorKey
from pilotlight.core.settings import Paths, PlatformSettings, SettingsInvalid
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.function import MethodSpec
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.policies import Objectives
from pilotlight.spec.pricing import PriceSettings
from pilotlight.spec.quotas import Quotas
from tests.activator.autoscaler.test_autoscaler_loop import Rig
from tests.activator.balancing.test_frozen_instances import frozen
from tests.activator.conftest import KEY, Edge
from tests.activator.llm.worlds import engine_spec
from tests.activator.test_gateway import until
from tests.fakes.authority import Authority
from tests.fakes.fake_controller import FakeController
from tests.fakes.fake_worker import FakeWorker, WorkerAnswer, WorkerRequest
from tests.fakes.routes import TENANT, change, route_of, spec_of, target_of
from tests.options.contract import CLUSTER, LOCAL, proves
from tests.options.test_function_spec import hang
from tests.options.world import made_with, parts_of, serving

REDIS = "redis://127.0.0.1:1/0"
"""Nobody listens there: what is made does not connect before it is used."""


@contextlib.asynccontextmanager
async def app_of(
    directory: Path, fleet: str, *, tls: bool = False, **settings: Any
) -> AsyncIterator[ActivatorApp]:
    """The objects of an activator's process with these settings; nothing runs yet."""
    (directory / "h").mkdir(exist_ok=True)
    ActivatorKey(bytes(32)).write(directory / "h/activator.key")
    more: dict[str, Any] = {}
    if tls:
        files = Authority().issue(directory / "tls", "127.0.0.1")
        more = {"tls_cert": str(files.cert), "tls_key": str(files.key), "tls_ca": str(files.ca)}
    platform = PlatformSettings(
        home=str(directory / "h"),
        run=str(directory / "r"),
        fleet="knative" if fleet == CLUSTER else "local",
        **more,
    )
    app = ActivatorApp(
        settings=ActivatorSettings(**settings),
        prices=PriceSettings(),
        context=load_context(Paths.of(platform, {}).make(), 0, platform),
        cluster=ClusterSettings() if fleet == CLUSTER else None,
    )
    try:
        yield app
    finally:
        for name, run in app.loops:
            if name == "calls of pods":  # it closes its listener when it ends
                loop = asyncio.create_task(run())
                await asyncio.sleep(0.05)
                loop.cancel()
                await asyncio.gather(loop, return_exceptions=True)
        await app.scaler.aclose()
        await app.fleet.aclose()
        await app.feed.aclose()
        await app.control.aclose()
        for close in app.closing:
            await close()
        if app.siblings is not None:
            await app.siblings.aclose()
        await app.quotas.aclose()
        if app.shared is not None:
            await app.shared.aclose()
        await app.billing.aclose()
        if app.sibling_listener is not None:
            app.sibling_listener[0].close()


def configured(directory: Path, fleet: str, text: str) -> ActivatorSettings:
    """Section `activator`, as the process reads it on that fleet."""
    file = directory / "platform.yaml"
    file.write_text(f"activator: {{{text}}}\n")
    return _settings(PlatformSettings(fleet="knative" if fleet == CLUSTER else "local"), file)


# -- addresses -------------------------------------------------------------------------------------
@proves("ActivatorSettings.listen", "ActivatorSettings.activators")
def test_it_listens_where_it_says_and_shares_its_port(fleet: str) -> None:
    listeners = listen(ActivatorSettings(listen="127.0.0.1:0"))
    assert listeners[0].getsockname()[0] == "127.0.0.1"
    assert not listeners[0].getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT)
    port = listeners[0].getsockname()[1]
    for one in listeners:
        one.close()
    several = ActivatorSettings(listen=f"127.0.0.1:{port}", activators=2, redis_url=REDIS)
    shared = listen(several)
    assert shared[0].getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT)
    for one in shared:
        one.close()


@proves("ActivatorSettings.grpc_listen")
async def test_inference_is_served_over_grpc_where_it_says(fleet: str, short_tmp: Path) -> None:
    assert open_grpc_sockets(configured(short_tmp, fleet, ""), short_tmp / "s") is None
    settings = configured(short_tmp, fleet, "grpc_listen: '127.0.0.1:0'")
    sockets = open_grpc_sockets(settings, short_tmp / "s")
    assert sockets is not None
    running = asyncio.create_task(GrpcProcess(sockets, "token", settings).run())
    reader, writer = await asyncio.open_connection(*sockets.listeners[0].getsockname())
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
    head = await reader.readexactly(9)
    assert head[3] == 4, "a server of HTTP/2 begins with SETTINGS"
    writer.close()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    for listener in sockets.listeners:
        listener.close()


@proves("ActivatorSettings.metrics_listen", "ActivatorSettings.metrics_series")
async def test_metrics_are_where_it_says_and_bounded(fleet: str, short_tmp: Path) -> None:
    settings = ActivatorSettings(metrics_listen="127.0.0.1:8701")
    assert settings.metrics_listen_of(1) == "127.0.0.1:8702"
    async with app_of(short_tmp, fleet, metrics_series=1) as app:
        for name in ("one", "two"):
            app.metrics.start_failed(target_of(spec_of(name)), "no_capacity")
        text = "".join(str(family.samples) for family in app.metrics.registry.collect())
        assert "'one'" in text
        assert "'two'" not in text


@proves(
    "ActivatorSettings.redis_url",
    "ActivatorSettings.redis_url_file",
    "ActivatorSettings.quota_store",
    "ActivatorSettings.sibling_url",
    "ActivatorSettings.sibling_listen",
)
async def test_several_activators_share_their_state(fleet: str, short_tmp: Path) -> None:
    (short_tmp / "url").write_text(REDIS)
    several: dict[str, Any] = {"activators": 2, "redis_url_file": str(short_tmp / "url")}
    if fleet == LOCAL:
        async with app_of(short_tmp, fleet, **several) as app:
            assert (app.shared is None, type(app.quotas).__name__) == (False, "RedisQuotas")
            assert own_socket(app.settings, app.context) is not None
        async with app_of(short_tmp, fleet, redis_url=REDIS, quota_store="redis") as app:
            assert (app.shared is None, type(app.quotas).__name__) == (True, "RedisQuotas")
    apart: dict[str, Any] = {"sibling_url": "https://a-{index}:1", "sibling_listen": "127.0.0.1:0"}
    async with app_of(short_tmp, fleet, tls=True, **several, **apart) as app:
        assert app.sibling_listener is not None
        assert own_socket(app.settings, app.context) is None
        assert app.siblings is not None
    async with app_of(short_tmp, fleet) as app:
        assert (app.shared, app.sibling_listener) == (None, None)


@proves("ActivatorSettings.without_redis")
async def test_what_is_counted_without_redis_is_open_or_closed(fleet: str, short_tmp: Path) -> None:
    kinds = {"requests": "closed"}
    async with app_of(
        short_tmp, fleet, redis_url=REDIS, quota_store="redis", without_redis=kinds
    ) as app:
        app.table.apply(change(1, route_of(spec_of())))
        quota = Quotas(requests_per_s=5)
        rule = Rule(of="tenant", subject="t", quotas=quota, tenant="t")
        check = app.quotas.quota_check((rule,))
        assert check is not None
        with pytest.raises(errors.Unavailable):
            await check.try_acquire(1, 0, 0)


@proves("ActivatorSettings.agents_listen", fleets=(CLUSTER,))
async def test_node_agents_pass_calls_on(fleet: str, short_tmp: Path) -> None:
    async with app_of(short_tmp, fleet, tls=True, agents_listen="127.0.0.1:0") as app:
        names = [name for name, _ in (*app.early_loops, *app.loops)]
        assert "node agents" in names
    with pytest.raises(SettingsInvalid, match=r"agents_listen = .*needs platform\.tls_cert"):
        async with app_of(short_tmp, fleet, agents_listen="127.0.0.1:0"):
            pass


@proves("ActivatorSettings.agents_listen", fleets=(LOCAL,))
def test_node_agents_of_a_cluster_are_refused(fleet: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsInvalid, match=r"activator\.agents_listen = .*node agents of a"):
        configured(tmp_path, fleet, "agents_listen: '127.0.0.1:0'")


# -- requests --------------------------------------------------------------------------------------
@proves("ActivatorSettings.max_body_bytes", "ActivatorSettings.max_header_bytes")
async def test_larger_requests_are_refused(fleet: str, short_tmp: Path) -> None:
    limits: dict[str, Any] = {"max_body_bytes": 500, "max_header_bytes": 2000}
    async with serving(short_tmp, fleet, **limits) as edge:
        edge.add(route_of(spec_of()))
        assert (await edge.call(content=b" " * 501)).status_code == 413
        answer = await edge.call(json={"x": 1}, headers={"x-large": "a" * 2000})
        assert answer.status_code == 431


async def raw(edge: Edge, sent: bytes) -> bytes:
    """The beginning of what a client that sends this and waits is answered."""
    host, _, port = edge.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    async with asyncio.timeout(20):
        answer = await reader.read(2000)
    writer.close()
    return answer


@proves("ActivatorSettings.header_timeout_s", "ActivatorSettings.body_timeout_s")
async def test_slow_requests_end(fleet: str, short_tmp: Path) -> None:
    async with serving(short_tmp, fleet, header_timeout_s=0.2, body_timeout_s=0.2) as edge:
        edge.add(route_of(spec_of()))
        began = time.monotonic()
        await raw(edge, b"POST / HTTP/1.1\r\nhost: x\r\n")
        head = (
            f"POST /v1/functions/shop/hello:invoke HTTP/1.1\r\nhost: x\r\n"
            f"authorization: Bearer {KEY}\r\ncontent-length: 9\r\n\r\n"
        )
        assert b"0.2 s" in await raw(edge, head.encode())
        assert time.monotonic() - began < 10


@proves("ActivatorSettings.argument_check_s")
async def test_costly_checks_of_arguments_end(fleet: str, short_tmp: Path) -> None:
    costly = {"type": "array", "items": {"type": "string", "pattern": "^(a+)+$"}}
    schema = {"type": "object", "properties": {"x": costly}}
    async with serving(short_tmp, fleet, argument_check_s=0.3, max_body_bytes=10_000) as edge:
        edge.add(route_of(spec_of(methods=(MethodSpec(schema=schema, parameters=("x",)),))))
        answer = await edge.call(json={"x": ["a" * 40 + "!"]})
        assert answer.status_code == 400
        assert edge.arguments.overruns in (0, 1)


@proves("ActivatorSettings.max_connections_per_address")
async def test_connections_of_an_address_are_bounded(fleet: str, short_tmp: Path) -> None:
    async with serving(short_tmp, fleet, max_connections_per_address=1) as edge:
        host, _, port = edge.url.removeprefix("http://").partition(":")
        _, first = await asyncio.open_connection(host, int(port))
        await until(lambda: edge.limits.connections)
        reader, second = await asyncio.open_connection(host, int(port))
        second.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await reader.read()
        await until(lambda: edge.limits.refused == 1)
        first.close()
        second.close()


@proves("ActivatorSettings.max_call_depth")
async def test_calls_of_functions_have_a_depth(fleet: str, short_tmp: Path) -> None:
    from tests.activator.test_calls_by_functions import MANY, called, calls, place

    async with serving(short_tmp, fleet, max_call_depth=1) as edge:
        place(edge, "a", calls("shop/b"), scaling=MANY)
        place(edge, "b", calls("shop/a"), scaling=MANY)
        _, answer = await called(edge, "a")
        status, problem = answer
        assert status == 400
        assert "activator.max_call_depth" in problem["detail"]


@proves("ActivatorSettings.max_queued")
async def test_waiting_calls_are_bounded(fleet: str, short_tmp: Path) -> None:
    async with serving(short_tmp, fleet, max_queued=1) as edge:
        edge.add(route_of(spec_of()))
        edge.fleet.gate.clear()
        first = asyncio.create_task(edge.call(json={"x": 1}))
        await until(lambda: edge.queue.waiting == 1)
        answer = await edge.call(json={"x": 2})
        assert answer.status_code in (429, 503)
        assert "max_queued" in answer.text
        edge.fleet.gate.set()
        await first


@proves(
    "ActivatorSettings.max_pending_submits",
    "ActivatorSettings.submitted_bytes",
    "ActivatorSettings.tenant_submitted_bytes",
)
@pytest.mark.parametrize(
    "bound",
    [
        {"max_pending_submits": 2},
        {"submitted_bytes": 1 << 20},
        {"tenant_submitted_bytes": 1 << 20},
    ],
    ids=lambda bound: next(iter(bound)),
)
async def test_submitted_calls_are_bounded(
    fleet: str, short_tmp: Path, bound: dict[str, Any]
) -> None:
    controller = await FakeController(short_tmp / "controller.sock").start()
    async with serving(short_tmp, fleet, max_body_bytes=1 << 20, **bound) as edge:
        untyped = (MethodSpec(parameters=("x",)),)
        edge.add(route_of(spec_of(methods=untyped, scaling=Scaling(max_instances=1))))
        edge.fleet.gate.clear()
        for _ in range(6):
            answer = await edge.call("shop/hello:submit", json={"x": "a" * 300_000})
            if answer.status_code != 202:
                break
        assert answer.status_code == 429
        assert next(iter(bound)) in answer.text
        edge.fleet.gate.set()
    await controller.aclose()


@proves("ActivatorSettings.waiting_bytes", "ActivatorSettings.tenant_waiting_bytes")
async def test_waiting_bodies_are_bounded(fleet: str, short_tmp: Path) -> None:
    for name in ("waiting_bytes", "tenant_waiting_bytes"):
        (short_tmp / name).mkdir()
        sizes: dict[str, Any] = {"max_body_bytes": 2 << 20, name: 1 << 20}
        async with serving(short_tmp / name, fleet, **sizes) as edge:
            edge.add(route_of(spec_of(methods=(MethodSpec(parameters=("x",)),))))
            edge.fleet.gate.clear()
            body = {"x": "a" * 700_000}
            first = asyncio.create_task(edge.call(json=body))
            await until(lambda waits=edge.queue: waits.waiting == 1)
            status = (await edge.call(json=body)).status_code
            edge.fleet.gate.set()
            assert (status, (await first).status_code) == (429, 200)


@proves("ActivatorSettings.unauthenticated_per_s")
async def test_wrong_keys_are_limited(fleet: str, short_tmp: Path) -> None:
    async with serving(short_tmp, fleet, unauthenticated_per_s=0.5) as edge:
        edge.stop_the_clock_of_strangers()
        edge.add(route_of(spec_of()))
        statuses = [(await edge.call(key="pl_no", json={"x": 1})).status_code for _ in range(2)]
        assert statuses == [401, 429]


@proves("ActivatorSettings.trusted_proxies")
async def test_a_proxy_says_who_calls(fleet: str, short_tmp: Path) -> None:
    given = ActivatorSettings(trusted_proxies=["127.0.0.0/8"]).trusted_proxies
    assert "127.0.0.0/8" in repr(TrustedProxies(given))
    for trusted, last in (([], 429), (given, 401)):
        directory = short_tmp / str(last)
        directory.mkdir()
        limits: dict[str, Any] = {"unauthenticated_per_s": 0.5, "trusted_proxies": trusted}
        async with serving(directory, fleet, **limits) as edge:
            edge.stop_the_clock_of_strangers()
            edge.add(route_of(spec_of()))
            for address in ("10.0.0.1", "10.0.0.2"):
                headers = {"x-forwarded-for": address}
                answer = await edge.call(key="pl_no", json={"x": 1}, headers=headers)
            assert answer.status_code == last


@proves("ActivatorSettings.stranger_connections")
async def test_strangers_hold_few_connections_to_the_controller(
    fleet: str, short_tmp: Path
) -> None:
    controller = await FakeWorker(short_tmp / "controller.sock", hang).start()
    async with serving(short_tmp, fleet, stranger_connections=2) as edge:
        first = asyncio.create_task(edge.client.get(f"{edge.url}/dashboard/"))
        await until(lambda: controller.requests)
        answer = await edge.client.get(f"{edge.url}/dashboard/")
        assert answer.status_code in (429, 503), answer.text
        first.cancel()
    await controller.aclose()


# -- money, failures -------------------------------------------------------------------------------
@proves("ActivatorSettings.journal_sync_s", "ActivatorSettings.journal_full")
async def test_the_journal_is_written_as_it_says(fleet: str, short_tmp: Path) -> None:
    async with app_of(short_tmp, fleet, journal_sync_s=0.2) as app:
        assert 0.2 in [
            made_with(log, SegmentLog)["sync_s"] for log in parts_of(app.billing, SegmentLog)
        ]
    for journal_full, status in (("refuse", 503), ("serve", 200)):
        directory = short_tmp / journal_full
        directory.mkdir()
        async with serving(directory, fleet, journal_full=journal_full) as edge:
            edge.add(route_of(spec_of()))
            await edge.call(json={"x": 1})
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(edge.books.journal, "open_call", full)
                assert (await edge.call(json={"x": 1})).status_code == status


def full(*_: Any, **__: Any) -> None:
    raise JournalFull("no room")


@proves("ActivatorSettings.scaledown_window_s")
async def test_idle_time_is_free_for_a_while(fleet: str, short_tmp: Path) -> None:
    async with app_of(short_tmp, fleet, scaledown_window_s=7.0) as app:
        assert "7 s free" in repr(app.billing)


@proves("ActivatorSettings.freeze_idle_s", fleets=(LOCAL,))
async def test_idle_instances_are_frozen(fleet: str, short_tmp: Path) -> None:
    async with Rig.running(short_tmp, freeze_idle_s=5.0) as rig:
        await frozen(rig)
        assert rig.fleet.naps[-1][0] == "ASLEEP"
    async with app_of(short_tmp, fleet, freeze_idle_s=5.0) as app:
        assert app.settings.freeze_idle_s == 5.0


@proves("ActivatorSettings.freeze_idle_s", fleets=(CLUSTER,))
def test_pods_are_not_frozen(fleet: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsInvalid, match=r"activator\.freeze_idle_s = 5: pods cannot"):
        configured(tmp_path, fleet, "freeze_idle_s: 5")


@proves(
    "ActivatorSettings.breaker_error_ratio",
    "ActivatorSettings.breaker_min_calls",
    "ActivatorSettings.breaker_open_s",
)
async def test_a_breaker_opens_as_it_says(fleet: str, short_tmp: Path) -> None:
    terms = {"breaker_error_ratio": 0.4, "breaker_min_calls": 3, "breaker_open_s": 7.0}
    health = None
    for n in range(3):
        assert health is None or health.breaker.state is State.CLOSED
        given = _breaker_terms(ActivatorSettings(**terms))  # type: ignore[arg-type]
        health = record_outcome(health, given, "i-1", Outcome.FAILED, n / 10)
    assert health is not None
    assert health.breaker.state is State.OPEN
    assert 3 < health.breaker.retry_after_s(0.2) < 11


@proves("ActivatorSettings.retry_budget")
async def test_retries_have_a_budget(fleet: str, short_tmp: Path) -> None:
    async with app_of(short_tmp, fleet, retry_budget=0.0) as app:
        assert not app.runner.retries.budgets.try_acquire("k", 0.0)
    async with app_of(short_tmp, fleet, retry_budget=0.5) as app:
        assert app.runner.retries.budgets.try_acquire("k", 0.0)


@proves("ActivatorSettings.idempotency_ttl_s", "ActivatorSettings.idempotency_bytes")
async def test_answers_are_kept_for_repeats(fleet: str, short_tmp: Path) -> None:
    ttl_s = 0.5
    async with serving(short_tmp, fleet, idempotency_ttl_s=ttl_s) as edge:
        edge.add(route_of(spec_of()))
        for attempt in range(20):  # until both are sent within the time
            headers = {"idempotency-key": f"k-{attempt}"}
            before, began = 0, time.monotonic()
            for _ in range(2):
                answer = await edge.call(json={"x": 1}, headers=headers)
                assert answer.status_code == 200
                requests = edge.fleet.workers[edge.fleet.started[0]].requests
                before = before or len(requests)
            if time.monotonic() - began < ttl_s:
                break
        assert len(requests) == before
        await asyncio.sleep(ttl_s + 0.1)
        await edge.call(json={"x": 1}, headers=headers)
        assert len(requests) == before + 1
    given = ActivatorSettings(idempotency_bytes=4 << 20)
    store = ProcessIdempotency(tenant_bytes=given.idempotency_bytes)
    for name in ("one", "two"):
        claim = Claim(name=name, tenant="t", fingerprint="f")
        await store.store(claim, b"a" * (3 << 20), ttl_s=60)
    assert "1 keys" in repr(store)
    async with app_of(short_tmp, fleet, idempotency_bytes=4 << 20) as app:
        assert f"{4 << 20} bytes each" in repr(app.idempotency)


@proves("ActivatorSettings.idempotency_total_bytes")
async def test_answers_of_all_tenants_are_bounded_in_redis(fleet: str, short_tmp: Path) -> None:
    shared: dict[str, Any] = {"redis_url": REDIS, "quota_store": "redis"}
    async with app_of(short_tmp, fleet, **shared, idempotency_total_bytes=5 << 20) as app:
        assert f"{5 << 20} bytes of all" in repr(app.idempotency)


# -- telemetry, language models, the end -----------------------------------------------------------
@proves("ActivatorSettings.traces_sampled")
async def test_a_share_of_traces_is_kept(fleet: str, short_tmp: Path) -> None:
    for share, count in ((0.0, 0), (1.0, 1)):
        directory = short_tmp / str(count)
        directory.mkdir()
        async with serving(directory, fleet, traces_sampled=share) as edge:
            patient = Objectives(warm_latency_s=60, cold_latency_s=60)
            edge.add(route_of(spec_of(objectives=patient)))
            await edge.call(json={"x": 1})
            edge.traces.clear()
            await edge.call(json={"x": 2})
            assert len(edge.traces) == count
    async with app_of(short_tmp, fleet, traces_sampled=0.25) as app:
        assert app.settings.traces_sampled == 0.25


@proves("ActivatorSettings.otlp_endpoint")
async def test_traces_are_exported(fleet: str, short_tmp: Path) -> None:
    async with app_of(short_tmp, fleet, otlp_endpoint="http://127.0.0.1:1") as app:
        assert "http://127.0.0.1:1" in repr(app.traces.otlp)
    async with app_of(short_tmp, fleet) as app:
        assert app.traces.otlp is None


@proves("ActivatorSettings.heartbeat_s")
async def test_silent_streams_have_heartbeats(fleet: str, short_tmp: Path) -> None:
    async def slow(request: WorkerRequest) -> WorkerAnswer:
        async def chunks() -> AsyncIterator[bytes]:
            await asyncio.sleep(0.5)
            yield b"data: 1\n\n"

        return WorkerAnswer(chunks=chunks(), content_type="text/event-stream")

    for heartbeat_s, beats in ((0.05, True), (30.0, False)):
        directory = short_tmp / str(beats)
        directory.mkdir()
        async with serving(directory, fleet, behaviour=slow, heartbeat_s=heartbeat_s) as edge:
            edge.add(route_of(spec_of(methods=(MethodSpec(is_generator=True),))))
            answer = await edge.call(json={}, headers={"accept": "text/event-stream"})
            comments = [line for line in answer.text.splitlines() if line.startswith(":")]
            assert bool(comments) is beats, answer.text


@proves("ActivatorSettings.engine_scrape_s")
async def test_engines_are_asked_as_often_as_it_says(fleet: str, short_tmp: Path) -> None:
    async with app_of(short_tmp, fleet, engine_scrape_s=0.7) as app:
        assert "each 0.7 s" in repr(app.engines)


@proves("ActivatorSettings.engine_kv_use", "ActivatorSettings.affinity_load")
async def test_engines_are_loaded_as_far_as_it_says(fleet: str, short_tmp: Path) -> None:
    async with app_of(short_tmp, fleet, engine_kv_use=0.6, affinity_load=2.0) as app:
        app.table.apply(change(1, route_of(engine_spec())))
        (target,) = app.table.targets_of(f"{TENANT}/main/shop/assistant")
        throttler = app.scaler.throttler_of(target)
        assert isinstance(throttler, EngineThrottler)
        assert throttler.engine_terms == EngineTerms(kv_target=0.6, load=2.0)


@proves("ActivatorSettings.drain_s", "ActivatorSettings.shutdown_s")
async def test_it_ends_as_slowly_as_it_says(fleet: str, short_tmp: Path) -> None:
    async with app_of(short_tmp, fleet, drain_s=0.2, shutdown_s=7) as app:
        config = server_config(app.gateway, app.limits, app.settings)
        assert config.timeout_graceful_shutdown == 7
        began = time.monotonic()
        await Activator(app).drain()
        assert time.monotonic() - began >= app.settings.drain_s
        assert app.health.is_draining
