"""The control plane under input and neighbours that mean no good, and under what only years
bring."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from pilotlight.controller import http_app
from pilotlight.controller.billing import budget_alerts, ledger, storage_charges, usage_ingestion
from pilotlight.controller.billing.budget_alerts import BudgetAlert
from pilotlight.controller.billing.budget_definition import parse_definition
from pilotlight.controller.billing.budgets import changes
from pilotlight.controller.database import delivery_retry, tables
from pilotlight.controller.database.store import Store
from pilotlight.controller.identity import tenants
from pilotlight.controller.identity.tenant_plan import TenantPlan
from pilotlight.controller.webhooks.webhook_sender import WebhookMessage, WebhookSender
from pilotlight.core.crypto import PlatformKey
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from pilotlight.spec.pricing import PriceSettings
from pilotlight.spec.quotas import BUILT_IN_PLANS
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import ManualClock, refused, usage
from tests.functions.controller.test_dashboard import sign_in
from tests.functions.controller.test_invoices import OCTOBER, config_of, hold, stored, use


# -- money -----------------------------------------------------------------------------------------
def test_a_price_list_that_is_gone_does_not_end_the_bookkeeping(
    store: Store, tmp_path: Path, short_tmp: Path
) -> None:
    config = config_of(tmp_path, short_tmp, weights_gib_month="0.72")
    old = TenantPlan(plan="standard", overrides={"prices": "2025"}, plans=BUILT_IN_PLANS)
    with store.write() as write:
        tenant = tenants.create(write, name="acme", uid_base=None, actor="platform", terms=old).id
    hold(store, tenant, "minilm", "aa", 1024**3)
    with store.write() as write:
        assert storage_charges.charge_storage(write, config, snapshots=None) == 1
    (record,) = stored(store).values()
    # as activators price the calls of such a tenant
    assert record.price_version == config.prices.version


async def test_more_instance_time_than_64_bits_of_nanoseconds_is_still_summed(
    controller: Controller,
) -> None:
    tenant, each = await controller.tenant(), 2**61
    # A month of 1,200 reserved instances.
    records = [
        usage(f"req-{n}/1", tenant=tenant, billed_ns=each, started_at=OCTOBER + n * 86_400)
        for n in range(6)
    ]
    await use(controller, *records)
    for query in ("by=function", "by=function&since=2026-10-01T00:30:00&until=2026-11-01T00:00:01"):
        answer = await controller.http.get(f"/v1/billing/report?{query}")
        assert answer.status_code == 200, answer.text
        assert answer.json()["rows"][0]["billed_ns"] in (6 * each, 5 * each)
    assert (await controller.http.get("/v1/billing/invoices/2026-10")).status_code == 200
    session = await sign_in(controller, controller.key)
    assert (
        await controller.client(None).get("/dashboard?span=90d", headers=session)
    ).status_code == 200


async def test_a_correction_is_found_again_only_if_it_is_the_same(controller: Controller) -> None:
    await use(controller, usage("req-1/1", tenant=await controller.tenant(), cost="1"))
    body, same = (
        {"record": "req-1/1", "amount": "-0.25", "note": "a mistake"},
        {"x-request-id": "once"},
    )
    first = await controller.http.post("/v1/billing/corrections", json=body, headers=same)
    again = await controller.http.post("/v1/billing/corrections", json=body, headers=same)
    assert (first.status_code, again.json()) == (201, first.json())
    other = await controller.http.post(
        "/v1/billing/corrections", json={**body, "amount": "-0.5"}, headers=same
    )
    assert "x-request-id" in refused(other, 409)


@pytest.mark.parametrize(
    "amount", ["1e999999999", "-1e999999999", "1E+100000", "nan", "1e-999999999"]
)
async def test_an_amount_of_a_million_digits_is_refused(
    controller: Controller, amount: str
) -> None:
    await use(controller, usage("req-1/1", tenant=await controller.tenant(), cost="1"))
    body = {"record": "req-1/1", "amount": amount, "note": "huge"}
    assert "amount" in refused(
        await controller.http.post("/v1/billing/corrections", json=body), 400
    )


@pytest.mark.parametrize("month", ["9999-12", "0-01", "2026-13", "2026-1"])
async def test_a_month_that_is_none_is_refused(controller: Controller, month: str) -> None:
    assert "month" in refused(
        await controller.http.post("/v1/billing/invoices", json={"month": month}), 400
    )


@pytest.mark.parametrize("currency", ["", "€", 'US"D', "US\r\nD", "a" * 17])
def test_a_currency_that_no_file_can_be_named_after_is_refused(currency: str) -> None:
    with pytest.raises(ValueError, match="currency"):
        PriceSettings(currency=currency)


async def test_a_call_that_was_corrected_is_what_it_was(controller: Controller) -> None:
    await use(controller, usage("req-1/1", tenant=await controller.tenant(), cost="1"))
    before = (await controller.http.get("/v1/calls/req-1")).json()
    body = {"record": "req-1/1", "amount": "-0.25", "note": "a mistake"}
    assert (await controller.http.post("/v1/billing/corrections", json=body)).status_code == 201
    after = (await controller.http.get("/v1/calls/req-1")).json()
    same = ("state", "status", "outcome", "start_kind", "exec_ms", "finished_at", "sequence")
    assert [after[name] for name in same] == [before[name] for name in same]
    assert (after["cost"], len(after["attempts"])) == ("0.750000000000", 2)
    session = await sign_in(controller, controller.key)
    page = (await controller.client(None).get("/dashboard/calls/req-1", headers=session)).text
    assert (page.count('<h2 id="attempt-'), "Correction" in page, "a mistake" in page) == (
        1,
        True,
        True,
    )


# -- neighbours ------------------------------------------------------------------------------------
@contextmanager
def statements(store: Store, about: str) -> Iterator[list[str]]:
    """Those sent to the database that name `about`."""
    seen: list[str] = []

    def note(*event: Any) -> None:
        if about in event[2]:
            seen.append(event[2])

    sa.event.listen(store.engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        sa.event.remove(store.engine, "before_cursor_execute", note)


def test_alerts_that_were_noted_cost_later_batches_nothing(
    store: Store, clock: ManualClock, tmp_path: Path
) -> None:
    key = PlatformKey.load_or_create(tmp_path / "platform.key")
    with store.write() as write:
        tenant = tenants.create(write, name="acme", uid_base=None, actor="platform").id
        for number in range(20):
            terms = parse_definition(
                amount="0.01",
                currency="USD",
                currencies={"USD"},
                app=f"app-{number}",
                alerts=range(10, 101, 10),
            )
            changes.put(write, key=key, tenant=tenant, terms=terms, actor="k-1")

    def spend(part: int) -> None:
        records = [
            usage(
                f"req-{part}-{n}/1", tenant=tenant, app=f"app-{n}", cost="1", started_at=clock.now
            )
            for n in range(20)
        ]
        with store.write() as write:
            usage_ingestion.ingest_usage(write, [record.to_json() for record in records])

    spend(1)
    with store.read() as sql:
        assert (
            sql.execute(sa.select(sa.func.count()).select_from(tables.budget_alerts)).scalar_one()
            == 200
        )
    with statements(store, "budget_alerts") as seen:
        spend(2)
    assert len(seen) <= 2, "one look, and nothing to write"


def test_a_tenant_with_many_alerts_leaves_places_for_those_of_others(
    store: Store, clock: ManualClock, tmp_path: Path
) -> None:
    key = PlatformKey.load_or_create(tmp_path / "platform.key")
    for name, count in (("many", 60), ("acme", 1)):
        with store.write() as write:
            tenant = tenants.create(write, name=name, uid_base=None, actor="platform").id
            for number in range(count):
                terms = parse_definition(
                    amount="1",
                    currency="USD",
                    currencies={"USD"},
                    app=f"app-{number}",
                    alerts=[50],
                    webhook="https://example.com/",
                )
                budget = changes.put(write, key=key, tenant=tenant, terms=terms, actor="k-1").budget
                budget_alerts.record_alerts(
                    write,
                    budget_id=budget.id,
                    tenant=tenant,
                    period="2027-01",
                    percents=[50],
                    spent="1",
                    is_sent=True,
                )
        clock.now += 1

    def claimed() -> list[BudgetAlert]:
        with store.write() as write:
            due = budget_alerts.due(write, limit=32)
            return delivery_retry.claim(write, tables.budget_alerts, due)

    first = claimed()
    assert tenant in {alert.tenant for alert in first}
    assert sum(alert.tenant != tenant for alert in first) == delivery_retry.AT_ONCE_OF_ONE
    rest = [alert for page in iter(claimed, []) for alert in page]
    assert len({alert.id for alert in first + rest}) == 61  # and each is taken once


@pytest.mark.parametrize(
    "url",
    [
        f"https://{'a' * 64}.example/x",
        "https://a..b/x",
        "https://xn--a/x",
        "https://%00/x",
        "https://[::1/x",
    ],
)
async def test_a_name_that_cannot_be_looked_up_is_an_outcome(url: str) -> None:
    async with WebhookSender(policy="any", attempt_s=5) as sender:
        message = WebhookMessage(id="al-1", type="budget.test", at=0.0, data={})
        outcome = await sender.post(message, url=url, secret="whsec_AAAA", now=0.0)
    assert outcome.error
    assert outcome.status is None


@pytest.mark.parametrize("cursor", ["nan~x", "-inf~x", "inf~x", "-1e300~x", "1e300~x", "~", "x"])
async def test_a_cursor_that_is_none_is_the_first_page(controller: Controller, cursor: str) -> None:
    await use(
        controller,
        usage("req-1/1", tenant=await controller.tenant(), started_at=controller.clock.now - 60),
    )
    session = await sign_in(controller, controller.key)
    answer = await controller.client(None).get(
        "/dashboard/calls", params={"before": cursor}, headers=session
    )
    assert answer.status_code == 200, answer.text
    assert ledger.ADJUSTMENT not in answer.text


async def _endless(seen: list[int]) -> AsyncIterator[bytes]:
    head = b'{"name": "'
    while sum(seen) < 4 * http_app.MAX_BODY_BYTES:
        seen.append(len(head))
        yield head
        head = b"a" * (1 << 20)


@pytest.mark.parametrize(
    "path, kind",
    [
        ("/v1/keys", "application/json"),
        ("/dashboard/login", "application/x-www-form-urlencoded"),
        ("/v1/budgets/b-1:test", "text/plain"),
        ("/internal/nodes", "application/json"),
    ],
)
async def test_a_body_without_end_is_not_kept_in_memory(
    controller: Controller, path: str, kind: str
) -> None:
    seen: list[int] = []
    async with controller.client(None) as stranger:
        answer = await stranger.post(path, content=_endless(seen), headers={"content-type": kind})
    assert answer.status_code in (400, 401, 403, 413), answer.text
    assert sum(seen) < http_app.MAX_BODY_BYTES + (2 << 20)


@pytest.mark.parametrize(
    "path,scope,status,most",
    [
        ("/v1/keys", None, 401, http_app.MAX_UNKNOWN_BYTES),
        ("/v1/apps/a/deploy", "invoke", 413, http_app.MAX_SMALL_BYTES),
        ("/v1/apps/a/deploy", "read-billing", 413, http_app.MAX_SMALL_BYTES),
        ("/v1/apps/a/deploy", "deploy", 413, http_app.MAX_BODY_BYTES),
        ("/v1/experiments", "deploy", 413, http_app.MAX_SMALL_BYTES),
        ("/internal/calls", None, 413, http_app.MAX_UNKNOWN_BYTES),
        ("/internal/usage", "platform", 413, http_app.MAX_BODY_BYTES),
    ],
)
async def test_who_asks_is_known_before_a_large_body_is_read(
    controller: Controller, path: str, scope: str | None, status: int, most: int
) -> None:
    seen: list[int] = []
    is_key = scope not in (None, "platform")
    headers = {"content-type": "application/json"}
    if scope == "platform":
        headers[HEADER_PLATFORM_TOKEN] = controller.context.key.token
    async with controller.client(
        await controller.new_key(scope=scope) if is_key else None
    ) as caller:
        answer = await caller.post(path, content=_endless(seen), headers=headers)
    refused(answer, status)
    assert sum(seen) <= most + (2 << 20)


@pytest.mark.parametrize(
    "path, body, most",
    [
        pytest.param(
            "/v1/apps/x/deploy",
            b'{"functions":[' + b"{}," * 60_000 + b"{}]}",
            http_app.MAX_DEPLOY_VALUES,
            id="deploy",
        ),
        pytest.param(
            "/v1/experiments",
            b'{"x":[' + b"1," * 20_000 + b"1]}",
            http_app.MAX_VALUES,
            id="another route",
        ),
        pytest.param(
            "/v1/experiments",
            b'{"x":[' + b"{}," * 2_000 + b"{}]}",
            http_app.MAX_VALUES,
            id="objects",
        ),
    ],
)
async def test_a_body_of_many_values_is_refused_before_it_is_decoded(
    controller: Controller, path: str, body: bytes, most: int
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for begin in range(0, len(body), 10_000):
            yield body[begin : begin + 10_000]

    async with controller.client(await controller.new_key(scope="deploy")) as caller:
        answer = await caller.post(
            path, content=pieces(), headers={"content-type": "application/json"}
        )
    assert f"more than {most} values" in refused(answer, 413)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"functions": [1] * 2_000}, id="functions that are none"),
        pytest.param({"functions": [], **{f"a{n}": 1 for n in range(2_000)}}, id="unknown members"),
        pytest.param({"functions": [], "labels": {f"a{n}": 1 for n in range(2_000)}}, id="labels"),
        pytest.param({"functions": [], "meta": {f"a{n}": 1 for n in range(2_000)}}, id="lineage"),
        pytest.param(
            {"functions": [], "evaluation": {f"a{n}": "x" for n in range(2_000)}}, id="numbers"
        ),
    ],
)
async def test_a_deploy_that_is_wrong_in_many_places_is_told_of_one(
    controller: Controller, body: dict[str, Any]
) -> None:
    answer = await controller.http.post("/v1/apps/x/deploy", json=body)
    refused(answer, 400)
    assert len(answer.json()["errors"]) == 1


async def test_a_body_in_another_encoding_than_utf_8_is_refused(controller: Controller) -> None:
    """In UTF-16 a letter can look like a quote, behind which nothing is counted."""
    body = ('{"\u2200":[' + "{}," * 5_000 + "{}]}").encode("utf-16")
    answer = await controller.http.post(
        "/v1/experiments", content=body, headers={"content-type": "application/json"}
    )
    assert "UTF-8" in refused(answer, 400)


async def test_a_form_is_small_whoever_sends_it(controller: Controller) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    answer = await controller.http.post("/dashboard/login", content=b"a=1&" * 20_000, headers=form)
    assert answer.status_code == 413


async def test_a_hop_that_a_caller_makes_up_does_not_hide_the_one_that_the_activator_saw(
    controller: Controller,
) -> None:
    async with controller.client(None) as browser:
        form = await browser.get("/dashboard/login")
        token = form.text.split('name="form" value="')[1].split('"')[0]
        hops = [
            ("x-forwarded-for", "127.0.0.1"),
            ("x-forwarded-for", "203.0.113.9"),
            ("cookie", f"pilotlight_form={token}"),
        ]
        answer = await browser.post(
            "/dashboard/login", data={"key": controller.key, "form": token}, headers=hops
        )
    assert answer.status_code == 403
    assert "requires https" in answer.text


@pytest.mark.parametrize("address", ["fe80::1%lo", "not an address"])
async def test_an_address_that_no_url_can_have_is_an_outcome(address: str) -> None:
    async def found(host: str, port: int) -> list[str]:
        return [address]

    async with WebhookSender(policy="any", attempt_s=5, resolve=found) as sender:
        message = WebhookMessage(id="al-1", type="budget.test", at=0.0, data={})
        outcome = await sender.post(
            message, url="http://hooks.example:1/x", secret="whsec_AAAA", now=0.0
        )
    assert outcome.error
    assert outcome.status is None


def test_a_webhook_that_comes_late_is_told_what_is_reached_already(
    store: Store, clock: ManualClock, tmp_path: Path
) -> None:
    key = PlatformKey.load_or_create(tmp_path / "platform.key")
    with store.write() as write:
        tenant = tenants.create(write, name="acme", uid_base=None, actor="platform").id

    def put(webhook: str | None) -> str:
        terms = parse_definition(
            amount="1", currency="USD", currencies={"USD"}, alerts=[50, 80, 100], webhook=webhook
        )
        with store.write() as write:
            return changes.put(write, key=key, tenant=tenant, terms=terms, actor="k-1").budget.id

    def waiting() -> list[int]:
        with store.read() as sql:
            return [
                alert.percent
                for alert in budget_alerts.listing(sql, budgets=[budget])
                if alert.next_attempt_at is not None
            ]

    budget = put(None)
    with store.write() as write:
        usage_ingestion.ingest_usage(
            write, [usage(tenant=tenant, cost="0.85", started_at=clock.now).to_json()]
        )
    assert waiting() == []
    put("https://example.com/hook")
    assert waiting() == [80, 50]
    with store.write() as write:
        table = tables.budget_alerts
        for alert in delivery_retry.claim(write, table, budget_alerts.due(write, limit=10)):
            delivery_retry.record_attempt(write, table, alert, error=None)
    put("https://example.com/other")
    put(None)
    put("https://example.com/hook")
    assert waiting() == []  # each of them was delivered once
