"""Proofs of schedules, fallbacks, variants, objectives and the model card."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pilotlight.controller.database.store import Store
from pilotlight.controller.scheduling.schedules import GRACE_S
from pilotlight.errors import ReleaseFrozen
from pilotlight.spec.identifiers import Priority
from pilotlight.spec.observations import latency_bucket
from pilotlight.spec.policies import Fallback, ModelCard, Objectives, Variant
from pilotlight.spec.record_json import to_json
from tests.activator.calls.test_fallback import DEGRADED, broken, says_small, taken, with_variant
from tests.activator.conftest import Edge
from tests.activator.test_gateway import until
from tests.fakes.databases import empty_sqlite
from tests.fakes.routes import route_of, spec_of
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import ManualClock
from tests.functions.controller.parts import spec as json_spec
from tests.functions.controller.test_objectives import World, _demand, _world
from tests.functions.controller.test_schedules import HOUR, Clockwork
from tests.options.contract import proves


@pytest.fixture
def clockwork(tmp_path: Path) -> Iterator[Clockwork]:
    """An app with schedules, at 08:00 UTC."""
    clock = ManualClock()
    store = Store(empty_sqlite(tmp_path / "controller.db"), clock=clock)
    yield Clockwork(store, clock)
    store.close()


@proves("Schedule.cron", "Schedule.timezone", "Schedule.method", "Schedule.arguments")
def test_a_cron_expression_calls_a_method_at_its_time(fleet: str, clockwork: Clockwork) -> None:
    clockwork.deploy(
        {"cron": "0 10 * * *", "timezone": "Europe/Berlin", "method": "run", "arguments": [7]},
        methods=[{"name": "run"}],
    )
    clockwork.clock.now += HOUR - 1  # 10:00 in Berlin is 09:00 UTC in winter
    assert clockwork.fire() == 0
    clockwork.clock.now += 1
    assert clockwork.fire() == 1
    (held,) = clockwork.claim()
    assert held["record"]["method"] == "run"
    assert json.loads(base64.b64decode(held["body"])) == [7]


@proves("Schedule.period_s", "Schedule.missed")
def test_a_period_calls_again_and_what_was_missed_is_as_declared(
    fleet: str, clockwork: Clockwork
) -> None:
    clockwork.deploy({"period_s": 3600})
    clockwork.clock.now += HOUR
    assert clockwork.fire() == 1
    clockwork.clock.now += 5 * HOUR + 2 * GRACE_S
    assert clockwork.fire() == 0, "missed runs are skipped"
    clockwork.deploy({"period_s": 3600, "missed": "catch_up"})
    clockwork.clock.now += 5 * HOUR + 2 * GRACE_S
    assert clockwork.fire() == 1, "one call for all that were missed"


@proves("Fallback.kind", "Fallback.status", "Fallback.body")
async def test_a_static_answer_replaces_a_function_that_does_not_start(
    fleet: str, edge: Edge
) -> None:
    edge.add(route_of(spec_of(fallback=(Fallback(kind="static", status=203, body={"a": 1}),))))
    broken(edge, "hello")
    answer = await edge.call(json={"x": 1})
    assert (answer.status_code, answer.json(), answer.headers[DEGRADED]) == (
        203,
        {"a": 1},
        "static",
    )


@proves("Fallback.function")
async def test_another_function_answers(fleet: str, edge: Edge) -> None:
    edge.add(route_of(spec_of(fallback=(Fallback(kind="function", function="small"),))))
    edge.add(route_of(spec_of("small")))
    edge.fleet.behaviours["small"] = says_small
    broken(edge, "hello")
    assert (await edge.call(json={"x": 1})).json() == "small"


@proves("Fallback.max_age_s")
@pytest.mark.parametrize("max_age_s, status", [(60, 200), (1, 502)])
async def test_a_cached_answer_has_an_age(
    fleet: str, edge: Edge, max_age_s: float, status: int
) -> None:
    edge.add(route_of(spec_of(fallback=(Fallback(kind="cached", max_age_s=max_age_s),))))
    await edge.call(json={"x": 1})
    broken(edge, "hello")
    await edge.fleet.kill(edge.fleet.started[0], "killed")
    await until(
        lambda: not any(scaled.throttler.instances for scaled in edge.scaler.revisions.values())
    )
    await asyncio.sleep(1.05)
    assert (await edge.call(json={"x": 1})).status_code == status


@proves("Variant.function", "Variant.priorities")
async def test_a_variant_answers_calls_of_its_priorities(fleet: str, edge: Edge) -> None:
    variant = Variant(function="small", priorities=(Priority.BATCH,))
    assert variant.priorities == (Priority.BATCH,)
    await with_variant(edge, *variant.priorities)
    first = await taken(edge)
    second = asyncio.create_task(edge.call(json={"x": 2}))
    await until(lambda: edge.queue.waiting == 1)
    batch = await edge.call(json={"x": 3}, headers={"pilotlight-priority": "batch"})
    assert batch.headers[DEGRADED] == f"variant={variant.function}"
    edge.release.set()  # type: ignore[attr-defined]
    assert DEGRADED not in (await second).headers
    await first


OBJECTIVES = Objectives(
    availability=0.98,
    warm_latency_s=0.2,
    warm_ratio=0.97,
    first_token_s=0.4,
    first_token_ratio=0.96,
    cold_latency_s=6.0,
    cold_ratio=0.94,
    completion_ratio=0.93,
    degraded_ratio=0.07,
    window_days=7,
    stages_s={"queue": 0.03},
)


@proves(
    "Objectives.availability",
    "Objectives.warm_latency_s",
    "Objectives.warm_ratio",
    "Objectives.first_token_s",
    "Objectives.first_token_ratio",
    "Objectives.cold_latency_s",
    "Objectives.cold_ratio",
    "Objectives.completion_ratio",
    "Objectives.degraded_ratio",
    "Objectives.window_days",
    "Objectives.stages_s",
)
async def test_objectives_are_what_calls_are_measured_by(
    fleet: str, controller: Controller
) -> None:
    world = await _world(controller, OBJECTIVES)
    slow = {"warm": {latency_bucket(400): 60, 3: 40}, "exec": {3: 100}}
    world.see(answered=100, latency=slow)
    body = (await controller.http.get("/v1/slos/search/hello")).json()
    targets = {one["sli"]: one["target"] for one in body["slis"]}
    bounds = {one["sli"]: one.get("bound_s") for one in body["slis"]}
    assert targets["availability"] == OBJECTIVES.availability
    assert targets["warm_latency"] == OBJECTIVES.warm_ratio
    assert bounds["warm_latency"] == OBJECTIVES.warm_latency_s
    assert targets["first_token"] == OBJECTIVES.first_token_ratio
    assert bounds["first_token"] == OBJECTIVES.first_token_s
    assert targets["cold_latency"] == OBJECTIVES.cold_ratio
    assert bounds["cold_latency"] == OBJECTIVES.cold_latency_s
    assert targets["completion"] == OBJECTIVES.completion_ratio
    assert targets["degraded"] == pytest.approx(1 - OBJECTIVES.degraded_ratio)
    assert body["window_days"] == OBJECTIVES.window_days
    (queue,) = [one for one in body["stages"] if one["stage"] == "queue"]
    assert queue["budget_s"] == OBJECTIVES.stages_s["queue"]


@proves("Objectives.freeze")
@pytest.mark.parametrize("freeze", [True, False])
async def test_a_spent_budget_freezes_releases(
    fleet: str, controller: Controller, *, freeze: bool
) -> None:
    world: World = await _world(controller, replace(OBJECTIVES, freeze=freeze))
    world.see(answered=900, failed=100)
    if not freeze:
        _demand(world)
        return
    with pytest.raises(ReleaseFrozen):
        _demand(world)


@proves(
    "ModelCard.task",
    "ModelCard.owner",
    "ModelCard.tokenizer",
    "ModelCard.sampling",
    "ModelCard.safety",
)
async def test_the_model_card_is_shown(fleet: str, controller: Controller) -> None:
    card = ModelCard(
        task="text-embedding",
        owner="search team",
        tokenizer="minilm",
        sampling={"temperature": 0},
        safety={"filter": "strict"},
    )
    body: dict[str, Any] = {"functions": [json_spec(card=to_json(card))]}
    answer = await controller.http.post("/v1/apps/search/deploy", json=body)
    (done,) = answer.json()["functions"]
    path = f"/v1/apps/search/functions/hello/revisions/{done['revision']}"
    manifest = (await controller.http.get(path)).json()
    shown = json.dumps(manifest)
    for text in (card.task, card.owner, card.tokenizer, "temperature", "strict"):
        assert text in shown
    assert card.sampling["temperature"] == 0
    assert card.safety["filter"] == "strict"
