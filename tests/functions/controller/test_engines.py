"""What is shown of language models: by the API, and on the page, from observations, records and
rollups."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from pilotlight.controller.billing import ledger
from pilotlight.controller.database import tables
from pilotlight.controller.slo import observations
from pilotlight.spec.observations import Observation, latency_bucket
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import spec, usage
from tests.functions.controller.test_dashboard import sign_in
from tests.functions.controller.test_weights import upload

ENGINE = {
    "model": "tiny",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "lora": {"poet": "poet-weights"},
}


@pytest.fixture
async def function_id(controller: Controller, tmp_path: Path) -> str:
    manifest = await upload(controller.http, tmp_path / "model")
    weights = [{"name": name, "manifest": manifest} for name in ("tiny", "poet-weights")]
    body = spec("assistant", kind="engine", module="", qualname="", engine=ENGINE, weights=weights)
    answer = await controller.http.post(
        "/v1/apps/llm/deploy", json={"functions": [body, spec("plain")]}
    )
    assert answer.status_code in (200, 201), answer.text
    with controller.context.store.read() as sql:
        table = tables.functions
        return str(
            sql.execute(sa.select(table.c.id).where(table.c.name == "assistant")).scalar_one()
        )


async def test_an_engine_environment_that_is_a_path_is_refused(
    controller: Controller, tmp_path: Path
) -> None:
    manifest = await upload(controller.http, tmp_path / "model")
    weights = [{"name": name, "manifest": manifest} for name in ("tiny", "poet-weights")]
    for name in ("..", "../../etc", "/etc", ""):
        engine = {**ENGINE, "environment": name}
        body = spec(
            "assistant", kind="engine", module="", qualname="", engine=engine, weights=weights
        )
        answer = await controller.http.post("/v1/apps/llm/deploy", json={"functions": [body]})
        assert answer.status_code == 400, answer.text
        assert f"engine environment {name!r}: use 1 to 63 letters" in answer.json()["detail"]


def see(controller: Controller, function_id: str, tenant: str, **counts: Any) -> None:
    minute = int(controller.clock.now // 60) - 1
    one = Observation(
        tenant=tenant, function_id=function_id, revision="v1", minute=minute, **counts
    )
    with controller.context.store.write() as write:
        observations.ingest_observations(
            write, {"activator": "a", "life": "l", "sequence": 1, "observations": [one.to_json()]}
        )


def bill(controller: Controller, function_id: str, tenant: str, *calls: dict[str, Any]) -> None:
    records = [
        usage(
            f"req-{n}/1",
            tenant=tenant,
            app="llm",
            function="assistant",
            function_id=function_id,
            started_at=controller.clock.now - 60,
            billed_ns=2_000_000_000,
            **call,
        )
        for n, call in enumerate(calls)
    ]
    with controller.context.store.write() as write:
        ledger.add(write, records)


async def test_a_model_is_shown_with_its_tokens_times_and_price(
    controller: Controller, function_id: str
) -> None:
    tenant = await controller.tenant()
    await controller.other_tenant("acme")
    with controller.context.store.read() as sql:
        other = sql.execute(
            sa.select(tables.tenants.c.id).where(tables.tenants.c.name == "acme")
        ).scalar_one()
    see(
        controller,
        function_id,
        tenant,
        answered=9,
        failed=1,
        streams=8,
        streams_completed=6,
        tokens_in=1000,
        tokens_out=500,
        tokens_cached=250,
        out_of_memory=1,
        latency={
            "ttft": {latency_bucket(40): 9, latency_bucket(400): 1},
            "itl": {latency_bucket(20): 100},
            "kv": {10: 5, 80: 1},
        },
    )
    bill(
        controller,
        function_id,
        tenant,
        {
            "tokens_in": 900,
            "tokens_out": 300,
            "finish": "stop",
            "first_token_ms": 40,
            "cost": "0.000000600000",
        },
        {
            "tokens_in": 100,
            "tokens_out": 100,
            "finish": "length",
            "first_token_ms": 900,
            "start_kind": "RESTORE",
            "cost": "0.000000200000",
        },
        {
            "tokens_in": 100,
            "tokens_out": 100,
            "finish": "stop",
            "first_token_ms": 60,
            "caller": other,
            "cost": "0.000000200000",
        },
    )

    found = (await controller.http.get("/v1/engines/llm/assistant")).json()

    assert (found["tokens_in"], found["tokens_out"], found["cached"], found["out_of_memory"]) == (
        1000,
        500,
        0.25,
        1,
    )
    assert (found["calls"], found["failed"], found["completed"]) == (10, 1, 0.75)
    assert found["first_token"]["p50_ms"] == pytest.approx(40, rel=0.1)
    assert found["first_token"]["p99_ms"] == pytest.approx(400, rel=0.1)
    assert found["cache_use"] == [10, 80]
    assert found["first_token_by_start"]["RESTORE"] == {"n": 1, "p50_ms": 900.0, "p99_ms": 900.0}
    assert found["first_token_by_start"]["WARM"]["n"] == 2
    assert found["finishes"] == {"length": 1, "stop": 2}
    assert found["tokens_per_s"] == pytest.approx(500 / 6)
    assert Decimal(found["price_per_1k"]) == Decimal("0.000000625")
    assert [(share["tokens_in"], share["tenant"]) for share in found["tenants"]][1] == (100, "acme")
    assert (found["adapters"], found["gpu_count"], found["tokens_per_gpu_s"]) == (["poet"], 0, None)


async def test_a_model_that_nobody_called_has_no_numbers_and_others_are_no_models(
    controller: Controller, function_id: str
) -> None:
    (found,) = (await controller.http.get("/v1/engines")).json()["engines"]

    assert (found["app"], found["function"]) == ("llm", "assistant")
    assert (found["calls"], found["first_token"], found["price_per_1k"], found["cache_use"]) == (
        0,
        None,
        None,
        None,
    )
    answer = await controller.http.get("/v1/engines/llm/plain")
    assert answer.status_code == 404
    assert "engine list" in answer.json()["detail"]


async def test_another_tenant_sees_none_of_it(controller: Controller, function_id: str) -> None:
    client = controller.client(await controller.other_tenant("acme"))

    assert (await client.get("/v1/engines")).json()["engines"] == []


async def test_the_page_shows_it_and_what_is_empty_says_so(
    controller: Controller, function_id: str
) -> None:
    tenant = await controller.tenant()
    session = await sign_in(controller, await controller.new_key(scope="admin"))
    client = controller.client(None)

    empty = await client.get("/dashboard/models", headers=session)
    see(
        controller,
        function_id,
        tenant,
        answered=2,
        tokens_in=10,
        tokens_out=20,
        latency={"ttft": {latency_bucket(40): 2}, "kv": {95: 1}},
    )
    bill(
        controller,
        function_id,
        tenant,
        {"tokens_in": 10, "tokens_out": 20, "finish": "stop", "first_token_ms": 40},
    )
    full = await client.get("/dashboard/models", headers=session)

    assert "No calls in the last 24 hours" in empty.text
    assert "llm/assistant" in full.text
    assert "at most 95 %" in full.text
    assert "stop 1" in full.text
    assert "poet" in full.text
