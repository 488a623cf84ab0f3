"""Tokens from a record to whoever asks: the call, the export, the report, the rollups and the
invoice."""

from __future__ import annotations

import csv
import io
import json
from decimal import Decimal

import pytest

from pilotlight.controller.billing import rollups
from pilotlight.protocol import UsageRecord
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import usage
from tests.functions.controller.test_dashboard import sign_in

OCTOBER = 1_790_812_800.0  # 2026-10-01, UTC
TOLD = {
    "tokens_in": 900,
    "tokens_out": 300,
    "tokens_cached": 64,
    "finish": "length",
    "first_token_ms": 41,
}


@pytest.fixture(name="records")
async def _records(controller: Controller) -> list[UsageRecord]:
    """A stream that ended, one that broke, and a call of another kind."""
    tenant = await controller.tenant()
    records = [
        usage("req-1/1", tenant=tenant, started_at=OCTOBER, cost="1.25", **TOLD),
        usage(
            "req-2/1",
            tenant=tenant,
            started_at=OCTOBER,
            cost="0.25",
            tokens_in=100,
            tokens_out=3,
            finish="error",
            status=502,
        ),
        usage("req-3/1", tenant=tenant, started_at=OCTOBER),
    ]
    body = {"activator": "a-0", "records": [one.to_json() for one in records]}
    for _ in range(2):  # an activator that did not hear the answer sends them again
        assert (await controller.internal("/internal/usage", body)).json()["accepted"] == 3
    return records


async def test_a_calls_attempts_say_what_it_took(
    controller: Controller, records: list[UsageRecord]
) -> None:
    answer = (await controller.http.get(f"/v1/calls/{records[0].call}")).json()
    [attempt] = answer["attempts"]
    assert {name: attempt[name] for name in TOLD} == TOLD
    [other] = (await controller.http.get(f"/v1/calls/{records[2].call}")).json()["attempts"]
    assert (other["finish"], other["tokens_out"], other["first_token_ms"]) == ("", 0, 0)


@pytest.mark.parametrize("format", ["ndjson", "csv"])
async def test_exported_records_have_every_field(
    controller: Controller, records: list[UsageRecord], format: str
) -> None:
    text = (await controller.http.get("/v1/billing/records", params={"format": format})).text
    rows = (
        list(csv.DictReader(io.StringIO(text)))
        if format == "csv"
        else [json.loads(line) for line in text.splitlines()]
    )
    first = next(row for row in rows if row["id"] == records[0].id)
    assert {name: str(first[name]) for name in TOLD} == {
        name: str(value) for name, value in TOLD.items()
    }


async def test_the_bill_and_the_invoice_add_tokens_up_as_the_records_do(
    controller: Controller, records: list[UsageRecord]
) -> None:
    bill = (await controller.http.get("/v1/billing/report", params={"by": "function"})).json()
    assert sum(row["tokens_in"] for row in bill["rows"]) == 1000
    assert sum(row["tokens_out"] for row in bill["rows"]) == 303
    with controller.context.store.read() as sql:
        assert rollups.verify(sql, tenant=records[0].tenant) == []

    made = (await controller.http.post("/v1/billing/invoices", json={"month": "2026-10"})).json()[
        "invoices"
    ][0]
    lines = csv.DictReader(
        io.StringIO(
            (
                await controller.http.get(
                    f"/v1/billing/invoices/{made['id']}", params={"format": "csv"}
                )
            ).text
        )
    )
    found = list(lines)
    assert (
        sum(int(line["tokens_in"]) for line in found),
        sum(int(line["tokens_out"]) for line in found),
    ) == (1000, 303)
    assert sum(Decimal(line["cost"]) for line in found) == sum(Decimal(one.cost) for one in records)


async def test_the_page_of_a_call_says_what_it_took_and_why_it_ended(
    controller: Controller, records: list[UsageRecord]
) -> None:
    session = await sign_in(controller, controller.key)
    told = (
        await controller.client(None).get(f"/dashboard/calls/{records[0].call}", headers=session)
    ).text
    for text in ("900 in (64 cached), 300 out", "First token", "41 ms", "length"):
        assert text in told
    plain = (
        await controller.client(None).get(f"/dashboard/calls/{records[2].call}", headers=session)
    ).text
    assert "First token" not in plain
