"""The books over HTTP: who may read what, as JSON, as CSV, and record by record."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from pilotlight.controller.billing import billing_jobs, ledger, price_lists, storage_charges
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store
from pilotlight.controller.identity import tenants
from pilotlight.controller.settings import ControllerConfig, ControllerSettings
from pilotlight.core import csv_format
from pilotlight.core.settings import Paths, SettingsInvalid
from pilotlight.protocol import UsageRecord
from pilotlight.spec.pricing import PriceSettings
from snapshotter.types import SnapshotState
from tests.fakes.reference_prices import price_usage
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import ManualClock, snapshot, usage

OCTOBER = 1_790_812_800.0  # 2026-10-01, UTC
DAY = 86_400.0


async def use(controller: Controller, *records: UsageRecord) -> None:
    answer = await controller.internal(
        "/internal/usage", {"activator": "a-0", "records": [one.to_json() for one in records]}
    )
    assert answer.status_code == 200, answer.text


async def issued(controller: Controller, month: str = "2026-10") -> list[dict[str, Any]]:
    answer = await controller.http.post("/v1/billing/invoices", json={"month": month})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["invoices"])


def status_and_type(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, str(answer.json()["type"].rpartition("/")[2])


def table_of(answer: httpx.Response) -> list[dict[str, str]]:
    assert answer.headers["content-type"] == csv_format.CONTENT_CSV
    return list(csv.DictReader(io.StringIO(answer.text)))


# -- invoices --------------------------------------------------------------------------------------
async def test_records_come_as_cloud_events_that_may_be_sent_again(controller: Controller) -> None:
    tenant = await controller.tenant()
    await use(
        controller,
        usage("req-1/1", tenant=tenant, customer="ana", started_at=OCTOBER + 0.25, cost="1.5"),
        usage("i-1/IDLE/2", tenant=tenant, kind="IDLE", started_at=OCTOBER + 1, function="fü"),
    )

    async def export(**asked: str) -> tuple[str, list[dict[str, Any]]]:
        params = {"format": "cloudevents", **asked}
        answer = await controller.http.get("/v1/billing/records", params=params)
        return answer.headers["content-type"], [json.loads(one) for one in answer.text.splitlines()]

    kind, events = await export()
    assert kind.startswith("application/x-ndjson")
    first, second = events
    records = (await controller.http.get("/v1/billing/records")).text.splitlines()
    assert [event.pop("data") for event in events] == [json.loads(one) for one in records]
    assert first == {
        "specversion": "1.0",
        "type": "dev.pilotlight.usage.recorded",
        "source": f"/tenants/{tenant}",
        "id": "req-1/1",
        "time": "2026-10-01T00:00:00.250000Z",
        "subject": "ana",
        "datacontenttype": "application/json",
    }
    assert (second["id"], second.get("subject")) == ("i-1/IDLE/2", None), "not an empty subject"
    assert [event["id"] for event in (await export(cursor="req-1/1"))[1]] == ["i-1/IDLE/2"]
    assert [event["id"] for event in (await export(customer="ana"))[1]] == ["req-1/1"]


async def test_a_tenant_reads_what_is_of_one_customer_or_key(controller: Controller) -> None:
    tenant = await controller.tenant()
    for customer, key, cost in (("ana", "k-1", "1"), ("bob", "k-2", "2")):
        one = usage(f"{key}/1", tenant=tenant, customer=customer, key=key, cost=cost)
        await use(controller, one)

    async def get(path: str, **asked: str) -> Any:
        answer = await controller.http.get(f"/v1/billing/{path}", params=asked)
        assert answer.status_code == 200, answer.text
        return answer

    by = (await get("report", by="customer")).json()["rows"]
    assert [(row["name"], row["cost"]) for row in by] == [("ana", "1"), ("bob", "2")]
    for part in ({"customer": "bob"}, {"key": "k-2"}):
        assert (await get("report", **part)).json()["totals"] == {"USD": "2"}
        statement = (await get("invoices/2027-01", **part)).json()
        assert (statement["status"], statement["total"]) == ("statement", "2.000000000000")
        table = table_of(await get("invoices/2027-01", format="csv", **part))
        assert [row["cost"] for row in table] == ["2.000000000000"]
    lines = (await get("records", customer="bob")).text.splitlines()
    assert [json.loads(line)["customer"] for line in lines] == ["bob"]


async def test_an_invoice_comes_as_json_and_as_a_table_that_adds_up(controller: Controller) -> None:
    tenant = await controller.tenant()
    await use(
        controller,
        usage("req-1/1", tenant=tenant, started_at=OCTOBER, cost="1.25"),
        usage("req-2/1", tenant=tenant, started_at=OCTOBER),
    )
    (made,) = await issued(controller)
    await controller.http.post(
        "/v1/billing/corrections",
        json={"record": "req-1/1", "amount": "-0.25", "note": "=HYPERLINK(1)"},
    )
    listed = (await controller.http.get("/v1/billing/invoices")).json()["invoices"]
    assert [(one["month"], one["status"], one["total"]) for one in listed] == [
        ("2026-11", "draft", "-0.250000000000"),
        ("2026-10", "issued", "1.250000045960"),
    ]
    answer = await controller.http.get(f"/v1/billing/invoices/{made['id']}")
    assert (
        answer.headers["content-disposition"]
        == f'attachment; filename="{made["id"]}-2026-10-USD.json"'
    )
    assert answer.json() == (await controller.http.get("/v1/billing/invoices/2026-10")).json()
    assert (answer.json()["tenant"]["name"], answer.json()["prices"]) == ("default", [])
    rows = table_of(await controller.http.get(f"/v1/billing/invoices/{made['id']}?format=csv"))
    assert sum(Decimal(row["cost"]) for row in rows) == Decimal(made["total"])
    (correction,) = table_of(await controller.http.get("/v1/billing/invoices/2026-11?format=csv"))
    assert (correction["invoice"], correction["note"], correction["cost"]) == (
        "draft",
        "'=HYPERLINK(1)",
        "-0.250000000000",
    )


async def test_the_operator_reads_every_tenants_books_and_nobody_else_does(
    controller: Controller,
) -> None:
    key = await controller.other_tenant("lender")
    async with controller.client(key) as lender:
        owner = (await lender.get("/v1/whoami")).json()["tenant"]["id"]
        await use(controller, usage("req-1/1", tenant=owner, started_at=OCTOBER, cost="3"))
        paths = (
            "report?since=0&tenant=",
            "invoices?tenant=",
            "invoices/2026-10?tenant=",
            "records?tenant=",
        )
        answers = [await controller.http.get(f"/v1/billing/{path}lender") for path in paths]
        assert [answer.status_code for answer in answers] == [200] * len(paths)
        assert [answers[0].json()["totals"], answers[1].json()["invoices"][0]["total"]] == [
            {"USD": "3"},
            "3.000000000000",
        ]
        assert json.loads(answers[3].text)["id"] == "req-1/1"
        assert (await controller.http.get("/v1/billing/report?tenant=nobody")).status_code == 404
        for path in paths:
            assert (await lender.get(f"/v1/billing/{path}default")).status_code == 403, path
            assert (await lender.get(f"/v1/billing/{path}lender")).status_code == 200, path


async def test_another_tenants_invoice_record_and_call_do_not_exist(controller: Controller) -> None:
    await use(controller, usage("req-1/1", tenant=await controller.tenant(), started_at=OCTOBER))
    (made,) = await issued(controller)
    async with controller.client(await controller.other_tenant()) as stranger:
        for path in (
            f"invoices/{made['id']}",
            "invoices/2026-10",
            f"invoices/{made['id']}?format=csv",
            "records?cursor=req-1/1",
        ):
            assert status_and_type(await stranger.get(f"/v1/billing/{path}")) == (
                404,
                "not-found",
            ), path
        assert status_and_type(await stranger.get("/v1/calls/req-1")) == (404, "not-found")
        assert (await stranger.get("/v1/billing/invoices")).json() == {"invoices": []}
        assert (await stranger.get("/v1/billing/records")).text == ""
        body = {"record": "req-1/1", "amount": "1", "note": "mine"}
        assert status_and_type(await stranger.post("/v1/billing/corrections", json=body)) == (
            403,
            "forbidden",
        )
        assert status_and_type(
            await stranger.post("/v1/billing/invoices", json={"month": "2026-10"})
        ) == (403, "forbidden")
        assert status_and_type(await stranger.post("/v1/billing/rollups:rebuild")) == (
            403,
            "forbidden",
        )


async def test_a_key_that_reads_bills_reads_all_of_them_and_changes_nothing(
    controller: Controller,
) -> None:
    await use(controller, usage("req-1/1", tenant=await controller.tenant(), started_at=OCTOBER))
    async with controller.client(await controller.new_key(scope="read-billing")) as reader:
        for path in ("report", "invoices", "invoices/2026-10", "records", "rates"):
            assert (await reader.get(f"/v1/billing/{path}")).status_code == 200, path
        assert status_and_type(
            await reader.post("/v1/billing/invoices", json={"month": "2026-10"})
        ) == (403, "forbidden")
        assert status_and_type(await reader.get("/v1/calls/req-1")) == (403, "forbidden")
        assert status_and_type(await reader.get("/v1/billing/verification")) == (403, "forbidden")
    async with controller.client(await controller.new_key(scope="invoke")) as invoker:
        for path in ("report", "invoices", "records", "rates"):
            assert status_and_type(await invoker.get(f"/v1/billing/{path}")) == (
                403,
                "forbidden",
            ), path


async def test_a_key_of_one_app_sees_the_bill_of_that_app(controller: Controller) -> None:
    tenant = await controller.tenant()
    await use(
        controller,
        usage("req-1/1", tenant=tenant, cost="1"),
        usage("req-2/1", tenant=tenant, app="other", cost="2"),
    )
    async with controller.client(await controller.new_key(scope="deploy", app="search")) as bound:
        assert (await bound.get("/v1/billing/report")).json()["totals"] == {"USD": "1"}
        assert (await bound.get("/v1/billing/report?app=other")).status_code == 403
        assert (await bound.get("/v1/billing/invoices")).status_code == 403
        assert (await bound.get("/v1/billing/records")).status_code == 403
        assert (await bound.get("/v1/calls/req-2")).status_code == 404
    assert (await controller.http.get("/v1/billing/report?app=other")).json()["totals"] == {
        "USD": "2"
    }


async def test_the_loop_issues_what_is_due(controller: Controller) -> None:
    tenant = await controller.tenant()
    # must not stand in the others' way
    await use(controller, usage("req-0/1", tenant="t-nobody", started_at=OCTOBER))
    await use(
        controller,
        usage("req-1/1", tenant=tenant, started_at=OCTOBER),
        usage("req-2/1", tenant=tenant, started_at=OCTOBER + 31 * DAY),
    )
    controller.clock.now = OCTOBER + 33 * DAY
    assert (
        billing_jobs.issue_due_invoices(
            controller.context.store,
            after_days=controller.context.config.settings.invoice_after_days,
        )
        == 0
    )
    controller.clock.now = OCTOBER + 34 * DAY
    assert (
        billing_jobs.issue_due_invoices(
            controller.context.store,
            after_days=controller.context.config.settings.invoice_after_days,
        )
        == 1
    )
    assert (
        billing_jobs.issue_due_invoices(
            controller.context.store,
            after_days=controller.context.config.settings.invoice_after_days,
        )
        == 0
    )
    listed = (await controller.http.get("/v1/billing/invoices")).json()["invoices"]
    assert [(one["month"], one["id"]) for one in listed] == [
        ("2026-11", None),
        ("2026-10", "inv-000001"),
    ]


# -- records ---------------------------------------------------------------------------------------
async def test_records_stream_as_lines_or_a_table_and_go_on_at_a_cursor(
    controller: Controller,
) -> None:
    tenant = await controller.tenant()
    records = [
        usage(
            f"req-{n:04}/1",
            tenant=tenant,
            app="-2+3" if n == 1 else "search",
            started_at=OCTOBER + n,
        )
        for n in range(2500)
    ]
    for at in range(0, 2500, 1000):
        await use(controller, *records[at : at + 1000])
    answer = await controller.http.get("/v1/billing/records")
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [
        UsageRecord(**{k: v for k, v in line.items() if k not in ("received_at", "month")})
        for line in lines
    ] == records
    assert {line["month"] for line in lines} == {"2026-10"}
    rows = table_of(await controller.http.get("/v1/billing/records?format=csv&limit=1200"))
    assert ([row["id"] for row in rows], rows[1]["app"]) == (
        [one.id for one in records[:1200]],
        "'-2+3",
    )
    more = await controller.http.get(
        "/v1/billing/records", params={"cursor": rows[-1]["id"], "until": OCTOBER + 2000}
    )
    assert [json.loads(line)["id"] for line in more.text.splitlines()] == [
        one.id for one in records[1200:2000]
    ]
    last = await controller.http.get(
        "/v1/billing/records", params={"cursor": records[-1].id, "format": "csv"}
    )
    assert last.text == ""


@pytest.mark.parametrize(
    "when", ["nan", "inf", "-1e300", "253402300800", "0000-01-01", "", "2026-11-31"]
)
async def test_a_time_that_is_none_is_refused(controller: Controller, when: str) -> None:
    for path in ("report", "records"):
        answer = await controller.http.get(f"/v1/billing/{path}", params={"until": when})
        assert status_and_type(answer) == (400, "invalid-input")


@pytest.mark.parametrize("query", ["since=yesterday", "limit=0", "format=xml", "cursor=req-9/1"])
async def test_a_wrong_question_for_records_is_refused(controller: Controller, query: str) -> None:
    assert (await controller.http.get(f"/v1/billing/records?{query}")).status_code in (400, 404)


@pytest.mark.parametrize("name", ["=1+1", "+A1", "-A1", "@SUM(A1)", "\t=1", "\r=1", '"=1'])
def test_a_cell_is_never_a_formula(name: str) -> None:
    text = "".join(csv_format.csv_lines(["name", "cost"], [{"name": name, "cost": "-0.5"}]))
    (row,) = csv.DictReader(io.StringIO(text, newline=""))
    assert row == {"name": name if name.startswith('"') else "'" + name, "cost": "-0.5"}


RATES = PriceSettings().version


# -- rates -----------------------------------------------------------------------------------------
async def test_a_tenant_sees_its_own_prices_and_those_that_priced_its_records(
    controller: Controller,
) -> None:
    partner = PriceSettings(others={"partner": {"request": "0.1"}, "secret": {"request": "0.2"}})
    key = await controller.other_tenant()
    with controller.context.store.write() as write:
        price_lists.record_price_lists(write, partner.lists())
    async with controller.client(key) as other:
        tenant = (await other.get("/v1/whoami")).json()["tenant"]["id"]
        await use(controller, usage("req-1/1", tenant=tenant, price_version="partner"))
        body = (await other.get("/v1/billing/rates")).json()
    assert (body["current"]["version"], sorted(one["version"] for one in body["lists"])) == (
        RATES,
        [RATES, "partner"],
    )
    everything = (await controller.http.get("/v1/billing/rates")).json()["lists"]
    assert sorted(one["version"] for one in everything) == [RATES, "partner", "secret"]


def test_changed_prices_without_a_new_version_stop_the_start(
    store: Store, tmp_path: Path, short_tmp: Path
) -> None:
    billing_jobs.initialise_billing(store, config_of(tmp_path, short_tmp))
    billing_jobs.initialise_billing(store, config_of(tmp_path, short_tmp))
    with pytest.raises(SettingsInvalid, match="give the changed prices a new version"):
        billing_jobs.initialise_billing(store, config_of(tmp_path, short_tmp, cpu_core_s="0.1"))


# -- verification ----------------------------------------------------------------------------------
async def test_sums_that_are_off_are_told_and_made_anew(controller: Controller) -> None:
    tenant = await controller.tenant()
    await use(controller, usage("req-1/1", tenant=tenant, started_at=OCTOBER, cost="1"))
    assert (await controller.http.get("/v1/billing/verification")).json() == {
        "records": 1,
        "differences": [],
        "invoices": [],
        "archives": 0,
    }
    with controller.context.store.write() as write:
        write.sql.execute(sa.update(tables.usage_hours).values(high=7))
    (found,) = (await controller.http.get("/v1/billing/verification")).json()["differences"]
    assert (found["table"], found["expected"], found["found"]) == (
        "usage_hours",
        [1, "1.000000000000"],
        [1, "0.007000000000"],
    )
    assert (await controller.http.post("/v1/billing/rollups:rebuild")).json() == {"records": 1}
    assert (await controller.http.get("/v1/billing/verification")).json()["differences"] == []


# -- storage ---------------------------------------------------------------------------------------
def config_of(home: Path, run: Path, **changes: Any) -> ControllerConfig:
    paths = Paths(home=home, run=run)
    return ControllerConfig(
        settings=ControllerSettings(),
        paths=paths,
        trust="isolated",
        uid_base=None,
        prices=PriceSettings(**changes),
    )


def stored(store: Store) -> Mapping[str, UsageRecord]:
    with store.read() as sql:
        found = ledger.find(sql, tables.usage.c.kind == storage_charges.STORAGE)
    return {one.id: one for one in found}


def hold(store: Store, tenant: str, name: str, manifest: str, size_bytes: int) -> None:
    row = {
        "tenant": tenant,
        "environment": "main",
        "name": name,
        "manifest": manifest,
        "size_bytes": size_bytes,
    }
    rest = {"files": 1, "source": "", "is_pinned": False, "created_at": 0, "updated_at": 0}
    with store.write() as write:
        write.sql.execute(sa.insert(tables.weights).values(**row, **rest))


def test_storage_is_charged_once_an_hour_for_what_is_there(
    store: Store, clock: ManualClock, tmp_path: Path, short_tmp: Path
) -> None:
    config = config_of(tmp_path, short_tmp, weights_gib_month="0.72", snapshot_gib_month="7.2")
    with store.write() as write:
        tenant = tenants.create(write, name="default", uid_base=None, actor="platform").id
    for name, manifest in (("minilm", "aa"), ("minilm-again", "aa"), ("big", "bb")):
        hold(store, tenant, name, manifest, 1024**3)
    found = [
        snapshot(tenant, image_bytes=1024**3),
        snapshot(tenant, image_bytes=5, state=SnapshotState.QUARANTINED),
        snapshot("t-gone", image_bytes=1024**3),
    ]

    def charge(seen: list[Any] | None) -> int:
        with store.write() as write:
            return storage_charges.charge_storage(write, config, snapshots=seen)

    hour = int(clock.now // 3600)
    assert charge(None) == 1  # the node does not answer: its part comes with the next look
    hold(store, tenant, "later", "cc", 1024**4)
    assert [charge(found), charge(found)] == [1, 0]
    clock.now += 3600
    assert charge([]) == 1
    records = stored(store)
    assert {key: one.cost for key, one in records.items()} == {
        f"storage/{tenant}/weights/{hour}": "0.002000000000",  # 2 GiB, of which one has two names
        f"storage/{tenant}/snapshots/{hour}": "0.010000000000",
        f"storage/{tenant}/weights/{hour + 1}": "1.026000000000",
    }
    assert all(
        price_usage(one, config.prices.rates()) == Decimal(one.cost) for one in records.values()
    )


async def test_storage_without_a_price_asks_nobody(controller: Controller) -> None:
    assert (
        await billing_jobs.charge_storage(
            controller.context.store, controller.context.agent, controller.context.config
        )
        == 0
    )
    assert stored(controller.context.store) == {}
