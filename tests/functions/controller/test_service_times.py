"""Measured times of a function: of its own records alone, bounded, for those who may call it."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from pilotlight.controller.analytics import service_times
from pilotlight.controller.billing import ledger
from pilotlight.controller.database import tables
from pilotlight.protocol import UsageRecord
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import INJECTIONS, refused, spec, usage

PATH = "/v1/apps/search/functions/hello/service-times"
SCALING = {"max_inputs": 4, "max_instances": 9}


@pytest.fixture(name="deployed")
async def _deployed(controller: Controller) -> Controller:
    body = {"functions": [spec(scaling=SCALING), spec("other")]}
    answer = await controller.http.post("/v1/apps/search/deploy", json=body)
    assert answer.status_code == 200, answer.text
    return controller


async def record(controller: Controller, n: int, **changes: Any) -> None:
    """Put `n` records of hello into the ledger, a second apart, up to now."""
    with controller.context.store.read() as sql:
        c = tables.functions.c
        function = sql.execute(sa.select(c.id).where(c.name == "hello")).scalar_one()
        r = tables.revisions.c
        revision = sql.execute(sa.select(r.name).where(r.function == function)).scalar_one()
    own = {
        "tenant": await controller.tenant(),
        "function": "hello",
        "function_id": function,
        "revision": revision,
        "price_version": "2026-11-26",
    }
    kind = changes.get("kind", "CALL")
    found: list[UsageRecord] = [
        usage(
            f"req-{kind}-{changes.get('start_kind', '')}-{changes.get('method', '')}-{number}/1",
            **{**own, "started_at": controller.clock() - 1 - number, **changes},
        )
        for number in range(n)
    ]
    with controller.context.store.write() as write:
        ledger.add(write, found)


async def asked(controller: Controller, **params: Any) -> dict[str, Any]:
    answer = await controller.http.get(PATH, params=params)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_calls_starts_and_terms_of_the_serving_revision(deployed: Controller) -> None:
    await record(deployed, 3, exec_ms=7, billed_ns=7_200_000)
    await record(deployed, 2, start_kind="COLD")
    await record(deployed, 1, start_kind="CACHED")
    await record(deployed, 1, outcome="error", status=500, method="broken")
    await record(deployed, 1, kind="START", start_kind="FORK", billed_ns=21_500_000)
    await record(deployed, 4, function_id="f-another", method="a")
    await record(deployed, 4, revision="v0-older", method="b")
    await record(deployed, 4, tenant="t-another", method="c")
    found = await asked(deployed)
    assert found["calls"]["exec_ms"] == [7, 7, 7]
    assert found["calls"]["billed_ns"] == [7_200_000] * 3
    assert found["calls"]["waited_ms"] == [3, 3, 3]
    assert found["calls"]["started_at"] == [deployed.clock() - n for n in (1, 2, 3)]
    assert (found["failed"], found["cold"], found["cached"], found["is_cut"]) == (1, 2, 1, False)
    assert found["starts_ms"] == {"FORK": [21.5]}
    assert (found["slots"], found["max_instances"], found["cpu"]) == (4, 9, 1.0)
    assert found["prices"]["instance_s"] == "0.00001532"


async def test_the_window_the_method_and_the_number_are_bounds(deployed: Controller) -> None:
    await record(deployed, 6, method="one")
    await record(deployed, 2, method="two")
    now = deployed.clock()
    assert len((await asked(deployed, method="two"))["calls"]["exec_ms"]) == 2
    newest = await asked(deployed, limit=3)
    assert (len(newest["calls"]["exec_ms"]), newest["is_cut"]) == (3, True)
    assert newest["since"] == now - 2
    part = await asked(deployed, since=now - 4, until=now - 2, method="one")
    assert part["calls"]["started_at"] == [now - 3, now - 4]


async def test_only_so_many_records_of_the_tenant_are_looked_at(
    deployed: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_times, "MAX_SCANNED", 5)
    await record(deployed, 5, function_id="f-another", method="a")
    await record(deployed, 8, method="b")
    found = await asked(deployed)
    assert 0 < len(found["calls"]["exec_ms"]) <= 5
    assert found["is_cut"] is True
    assert found["since"] > deployed.clock() - 10


async def test_who_may_call_the_function_may_read_its_times(deployed: Controller) -> None:
    await record(deployed, 1)
    for bound in ({}, {"app": "search"}, {"app": "search", "function": "hello"}):
        key = await deployed.new_key(scope="invoke", **bound)
        assert (await deployed.client(key).get(PATH)).status_code == 200, bound
    for bound in ({"app": "shop"}, {"app": "search", "function": "other"}):
        key = await deployed.new_key(scope="invoke", **bound)
        refused(await deployed.client(key).get(PATH), 403)
    billing = await deployed.new_key(scope="read-billing")
    refused(await deployed.client(billing).get(PATH), 403)
    refused(await deployed.client(None).get(PATH), 401)
    stranger = await deployed.other_tenant()
    refused(await deployed.client(stranger).get(PATH), 404)


@pytest.mark.parametrize(
    "params",
    [
        {"limit": 0},
        {"limit": service_times.MAX_CALLS + 1},
        {"since": "yesterday"},
        {"until": "nan"},
        {"method": "m" * 201},
    ],
)
async def test_bad_input_is_refused(deployed: Controller, params: dict[str, Any]) -> None:
    refused(await deployed.http.get(PATH, params=params), 400)


@pytest.mark.parametrize("name", INJECTIONS)
async def test_names_are_data(deployed: Controller, name: str) -> None:
    await record(deployed, 1)
    assert (await asked(deployed, method=name))["calls"]["exec_ms"] == []
    answer = await deployed.http.get(f"/v1/apps/{name}/functions/hello/service-times")
    assert answer.status_code in (400, 404)
