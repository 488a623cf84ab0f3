"""Proofs of section `controller` of platform.yaml."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pilotlight.controller.analytics import traces
from pilotlight.controller.billing import usage_ingestion
from pilotlight.controller.dashboard.page_context import LOGIN
from pilotlight.controller.identity import tenants
from pilotlight.controller.server import leader
from pilotlight.controller.server.database_lock import AlreadyRunning, ControllerLock
from pilotlight.controller.server.metrics import Metrics
from pilotlight.controller.server.process_user import _elsewhere
from pilotlight.controller.settings import ControllerConfig, ControllerSettings
from pilotlight.controller.slo import observations
from pilotlight.controller.weights.blobs import BlobStore
from pilotlight.core.crypto import PlatformKey, read_platform_key
from pilotlight.core.metrics_server import MetricsAddress
from pilotlight.core.settings import SettingsInvalid
from pilotlight.spec.observations import Observation
from tests.fakes.authority import Authority
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import BUNDLE_DIGEST, refused
from tests.functions.controller.parts import spec as json_spec
from tests.options.contract import CLUSTER, proves


def config_of(directory: Path, fleet: str, text: str, platform: str = "") -> ControllerConfig:
    """The controller's configuration from a platform.yaml on that fleet."""
    name = "knative" if fleet == CLUSTER else "local"
    file = directory / "platform.yaml"
    file.write_text(
        f"platform: {{fleet: {name}, home: {directory}{platform}}}\ncontroller: {{{text}}}\n"
    )
    return ControllerConfig.read(file)


def configure(controller: Controller, **settings: Any) -> None:
    """Change settings of a running controller."""
    config = controller.context.config
    changed = replace(config, settings=replace(config.settings, **settings))
    object.__setattr__(controller.context, "config", changed)


@proves("ControllerSettings.listen")
def test_other_machines_reach_it_there(fleet: str, short_tmp: Path) -> None:
    files = Authority().issue(short_tmp / "tls", "127.0.0.1")
    tls = f", tls_cert: {files.cert}, tls_key: {files.key}, tls_ca: {files.ca}"
    config = config_of(short_tmp, fleet, "listen: '127.0.0.1:0'", tls)
    listener = _elsewhere(config)
    assert listener is not None
    assert listener.getsockname()[0] == "127.0.0.1"
    listener.close()
    assert _elsewhere(config_of(short_tmp, fleet, "")) is None
    with pytest.raises(SettingsInvalid, match=r"controller\.listen"):
        config_of(short_tmp, fleet, "listen: '0.0.0.0:0'")


@proves("ControllerSettings.metrics_listen")
async def test_metrics_are_served_there(fleet: str, short_tmp: Path) -> None:
    config = config_of(short_tmp, fleet, "metrics_listen: '127.0.0.1:0'")
    address = MetricsAddress(
        socket_path=short_tmp / "m.sock",
        listen=config.settings.metrics_listen,
        token_file=short_tmp / "metrics.token",
        setting="controller.metrics_listen",
    ).opened()
    servers = await Metrics().expose(address)
    ports = {
        s.getsockname()[1] for one in servers for s in one.sockets if s.family == socket.AF_INET
    }
    assert len(ports) == 1
    for one in servers:
        one.close()


@proves("ControllerSettings.standby")
async def test_a_second_controller_waits_or_ends(fleet: str, short_tmp: Path) -> None:
    settings = config_of(short_tmp, fleet, "standby: false").settings
    from pilotlight.controller.database.store import Store
    from tests.fakes.databases import empty_sqlite

    store = Store(empty_sqlite(short_tmp / "controller.db"), clock=time.time)
    first = ControllerLock(short_tmp / "lock", store.engine)
    second = ControllerLock(short_tmp / "lock", store.engine)
    address = MetricsAddress(
        socket_path=short_tmp / "m.sock",
        listen=None,
        token_file=short_tmp / "t",
        setting="controller.metrics_listen",
    )
    async with leader.as_leader(first, waits=False, metrics=Metrics(), address=address):
        with pytest.raises(AlreadyRunning):
            async with leader.as_leader(
                second, waits=settings.standby, metrics=Metrics(), address=address
            ):
                pass
    assert config_of(short_tmp, fleet, "standby: true").settings.standby
    store.close()


@proves("ControllerSettings.database_url", "ControllerSettings.database_url_file")
def test_the_database_is_the_one_that_is_named(fleet: str, short_tmp: Path) -> None:
    assert config_of(short_tmp, fleet, "").is_own_file
    named = config_of(short_tmp, fleet, "database_url: 'sqlite:////elsewhere/db'")
    assert (named.database_url, named.is_own_file) == ("sqlite:////elsewhere/db", False)
    (short_tmp / "url").write_text("sqlite:////mounted/db\n")
    mounted = config_of(short_tmp, fleet, f"database_url_file: {short_tmp}/url")
    assert mounted.database_url == "sqlite:////mounted/db"


@proves("ControllerSettings.node_key_file")
def test_node_agents_have_a_key_of_their_own(fleet: str, short_tmp: Path) -> None:
    made = PlatformKey.load_or_create(short_tmp / "node.key")
    config = config_of(short_tmp, fleet, f"node_key_file: {short_tmp}/node.key")
    file = config.settings.node_key_file
    assert file is not None
    assert read_platform_key("controller.node_key_file", file).token == made.token
    with pytest.raises(SettingsInvalid, match=r"controller\.node_key_file"):
        read_platform_key("controller.node_key_file", str(short_tmp / "missing"))


@proves("ControllerSettings.bundle_max_bytes")
async def test_larger_bundles_are_413(fleet: str, controller: Controller) -> None:
    configure(controller, bundle_max_bytes=1024)
    body = {"functions": [json_spec(bundle=BUNDLE_DIGEST)]}
    assert (await controller.http.post("/v1/apps/a/deploy", json=body)).status_code == 200
    data = b"b" * 2000
    import hashlib

    digest = hashlib.sha256(data).hexdigest()
    await controller.http.put(f"/v1/blobs/{digest}", content=data)
    body = {"functions": [json_spec(bundle=digest)]}
    answer = await controller.http.post("/v1/apps/a/deploy", json=body)
    assert "at most 1024" in refused(answer, 413)


@proves("ControllerSettings.blob_max_bytes")
def test_larger_blobs_are_refused(fleet: str, short_tmp: Path) -> None:
    config = config_of(short_tmp, fleet, "blob_max_bytes: 2048")
    store = BlobStore.of(config.platform, config.paths, limit_bytes=config.settings.blob_max_bytes)
    assert store.limit_bytes == 2048
    with pytest.raises(ValueError, match="blob_max_bytes = 1: must be at least 1024"):
        ControllerSettings(blob_max_bytes=1)


@proves("ControllerSettings.default_plan")
async def test_new_tenants_have_the_default_plan(fleet: str, controller: Controller) -> None:
    configure(controller, default_plan="free")
    answer = await controller.http.post("/v1/tenants", json={"name": "acme"})
    assert answer.json()["plan"] == "free"


@proves("ControllerSettings.invoice_after_days")
def test_invoices_are_issued_after_some_days(fleet: str, store_of: Any) -> None:
    from pilotlight.controller.billing.billing_jobs import issue_due_invoices
    from pilotlight.controller.database import tables
    from tests.functions.controller.parts import usage

    jan_3 = 1_767_398_400.0  # 2026-01-03 00:00 UTC
    store_of.now = jan_3
    with store_of.write() as write:
        made = tenants.create(write, name="acme", uid_base=None, actor="platform")
    record = usage(tenant=made.id, started_at=jan_3 - 10 * 86_400, cost="1").to_json()
    with store_of.write() as write:
        usage_ingestion.ingest_usage(write, [record])
    for invoice_after_days, issued in ((5, 0), (2, 1)):
        settings = ControllerSettings(invoice_after_days=invoice_after_days)
        assert issue_due_invoices(store_of, after_days=settings.invoice_after_days) == issued
    with store_of.read() as sql:
        assert len(sql.execute(tables.invoices.select()).all()) == 1


@pytest.fixture
def store_of(tmp_path: Path) -> Iterator[Any]:
    """A database whose clock the test moves."""
    from pilotlight.controller.database.store import Store
    from tests.fakes.databases import empty_sqlite

    class Moved(Store):
        """Its clock is in the test's hand."""

        now = 1_800_000_000.0

    store = Moved(empty_sqlite(tmp_path / "controller.db"), clock=lambda: store.now)
    yield store
    store.close()


@proves("ControllerSettings.webhooks")
async def test_alerts_go_to_public_addresses_only_unless_allowed(
    fleet: str, controller: Controller
) -> None:
    body = {"url": "http://10.0.0.7/hook", "events": ["slo.*"]}
    for webhooks, statuses in (("public", {400}), ("any", {200, 201})):
        configure(controller, webhooks=webhooks)
        answer = await controller.http.put("/v1/webhooks/pager", json=body)
        assert answer.status_code in statuses, answer.text


@proves("ControllerSettings.dashboard_url")
def test_the_dashboard_has_its_origin(fleet: str, short_tmp: Path) -> None:
    config = config_of(short_tmp, fleet, "dashboard_url: 'https://dashboard.example'")
    origin = config.settings.dashboard_origin
    assert origin is not None
    assert "dashboard.example" in origin.url
    with pytest.raises(SettingsInvalid, match="dashboard_url"):
        config_of(short_tmp, fleet, "dashboard_url: 'http://127.0.0.1:8700'")


@proves("ControllerSettings.plain_http_sign_in")
async def test_sign_in_without_tls_is_refused_from_elsewhere(
    fleet: str, controller: Controller
) -> None:
    answers = []
    for plain_http_sign_in in (False, True):
        configure(controller, plain_http_sign_in=plain_http_sign_in)
        answers.append(
            await controller.http.get(
                LOGIN, headers={"x-forwarded-for": "10.0.0.9", "x-forwarded-proto": "http"}
            )
        )
    assert "plain_http_sign_in" in answers[0].text
    assert "plain_http_sign_in" not in answers[1].text


@proves("ControllerSettings.observations_days")
def test_observations_are_kept_by_the_minute(fleet: str, store_of: Any) -> None:
    settings = ControllerSettings(observations_days=5)
    now = 1_800_000_000
    with store_of.write() as write:
        for days in (4, 6):
            minute = (now - days * 86_400) // 60
            one = Observation(tenant="t", function_id="f", revision="v", minute=minute, answered=1)
            observations.add(write, [one])
        observations.mark(write, now // 3600)
        while observations.prune(write, days=settings.observations_days):
            pass
        left = observations.window(write.sql, function_id="f", since_s=0, until_s=now)
    assert sum(one.answered for one in left.values()) == 1


@proves("ControllerSettings.feedback_window_days")
async def test_outcomes_may_come_for_some_days(fleet: str, controller: Controller) -> None:
    from tests.functions.controller.parts import usage

    tenant = await controller.tenant()
    called_at = controller.clock() - 3 * 86_400
    record = usage(tenant=tenant, started_at=called_at).to_json()
    answer = await controller.internal("/internal/usage", {"records": [record]})
    assert answer.status_code == 200, answer.text
    for days, statuses in ((2, {400, 404, 409, 410}), (5, {200, 201, 204})):
        configure(controller, feedback_window_days=days)
        body = {"request_id": "req-1", "metrics": {"score": 1.0}}
        answer = await controller.http.post("/v1/feedback", json=body)
        assert answer.status_code in statuses, answer.text


@proves("ControllerSettings.traces_per_tenant")
def test_the_oldest_traces_go_first(fleet: str, store_of: Any) -> None:
    from pilotlight.controller.database import tables
    from tests.functions.controller.test_traces import trace

    settings = ControllerSettings(traces_per_tenant=2)
    with store_of.write() as write:
        made = [trace(number, at=1000.0 + number) for number in range(4)]
        traces.put(write, made, keep=settings.traces_per_tenant)
        kept = write.sql.execute(tables.traces.select()).all()
    assert len(kept) == 2


@proves("ControllerSettings.blob_grace_s")
async def test_unreferenced_blobs_are_kept_for_a_while(fleet: str, controller: Controller) -> None:
    from tests.functions.controller.test_storage import has, put

    await put(controller.http, b"alone")
    configure(controller, blob_grace_s=7200.0)
    for hours, is_there in ((1, True), (3, False)):
        controller.clock.now += hours * 3600 - (0 if is_there else 3600)
        from pilotlight.controller import process

        await process._collect(controller.context)
        assert await has(controller.http, b"alone") is is_there
