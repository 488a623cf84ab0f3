"""Drift and quality of monitored functions: sketches are counted once, windows are judged once,
planted drift is found, and a stationary stream raises no more alarms than stated."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from prometheus_client import generate_latest

from activator.prediction_log import monitoring
from pilotlight.controller.database import tables
from pilotlight.controller.drift import loop, sketch_store
from pilotlight.controller.drift.report import DriftStatus, compare
from pilotlight.controller.drift.sketch_store import FeatureCounts
from pilotlight.controller.drift.targets import find_targets
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from pilotlight.errors import InvalidInput
from pilotlight.protocol import PREDICTIONS_PATH
from pilotlight.spec.monitor import MonitoredFeature, MonitorSpec
from pilotlight.spec.record_json import to_json
from pilotlight.spec.sketches import Sketch
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import refused, spec
from tests.functions.controller.test_dashboard import sign_in

HOUR_S, DAY_S = 3600, 86_400
TERMS = MonitorSpec(
    features=(MonitoredFeature(path="$.age", low=0, high=120), MonitoredFeature(path="$.country")),
    prediction="$.score",
    label="label",
    positive="fraud",
    slices=("$.country",),
    window_h=1,
    min_rows=100,
    quality={"brier": 0.3},
)
LOG: dict[str, Any] = {"sample": 1.0, "keep_s": 7 * DAY_S, "monitor": to_json(TERMS)}
DRIFT = "/v1/apps/search/functions/hello/drift"


@pytest.fixture(name="deployed")
async def _deployed(controller: Controller) -> Controller:
    await deploy(controller)
    return controller


async def deploy(controller: Controller, **changes: Any) -> None:
    answer = await controller.http.post(
        "/v1/apps/search/deploy", json={"functions": [spec(log={**LOG, **changes})]}
    )
    assert answer.status_code == 200, answer.text


def place(controller: Controller) -> tuple[str, str]:
    """The function's id and revision."""
    with controller.context.store.read() as sql:
        row = sql.execute(sa.select(tables.revisions.c.function, tables.revisions.c.name)).first()
    assert row is not None
    return str(row.function), str(row.name)


def rows(
    n: int,
    *,
    revision: str,
    at_s: float,
    seed: int = 0,
    age: Callable[[random.Random], Any] = lambda rng: rng.gauss(40, 10),
) -> list[bytes]:
    """Rows of the writer with the values that are watched."""
    rng = random.Random(seed)
    lines = []
    for number in range(n):
        features = {
            "$.age": [age(rng), 0, 120],
            "$.country": [rng.choice(("DE", "FR")), None, None],
            "prediction": [rng.random(), None, None],
        }
        row = {
            "request_id": f"req-{seed}-{number}",
            "version": revision,
            "at_ns": int(at_s * 1e9),
            "watched": {"features": features, "slices": [features["$.country"][0]]},
        }
        lines.append(json.dumps(row).encode())
    return lines


async def put(
    controller: Controller, lines: Sequence[bytes], number: int, *, kinds: str = "parquet sketch"
) -> list[httpx.Response]:
    """Ship a file of rows and its sketch, as the activator does."""
    function, _ = place(controller)
    tenant, hour = await controller.tenant(), int(json.loads(lines[0])["at_ns"] / 1e9) // HOUR_S
    name = f"{tenant}~{function}~{hour}~{7 * DAY_S}~{number:024x}~{len(lines)}"
    headers = {HEADER_PLATFORM_TOKEN: controller.context.key.token}
    bodies = {"parquet": b"PAR1", "sketch": monitoring.sketch(lines) or b""}
    return [
        await controller.http.put(
            f"{PREDICTIONS_PATH}/{name}.{kind}", content=bodies[kind], headers=headers
        )
        for kind in kinds.split()
    ]


async def hour_of(controller: Controller, number: int, *, n: int = 600, **changes: Any) -> None:
    """An hour with n rows, at whose end the clock is; then the window is judged."""
    now = controller.clock()
    begin = now - now % HOUR_S
    lines = rows(n, revision=place(controller)[1], at_s=begin + 60, seed=number, **changes)
    for answer in await put(controller, lines, number):
        assert answer.json() == {"stored": True}, answer.text
    controller.clock.now = begin + HOUR_S + loop.GRACE_S
    loop.judge_all(controller.context.store, now=controller.clock())


async def set_baseline(controller: Controller, *, n: int = 2_000) -> None:
    rng = random.Random(99)
    features = {
        "$.age": Sketch.of([rng.gauss(40, 10) for _ in range(n)], low=0, high=120),
        "$.country": Sketch.of([rng.choice(("DE", "FR")) for _ in range(n)]),
        "prediction": Sketch.of([rng.random() for _ in range(n)]),
    }
    body = {"rows": n, "features": {name: one.to_json() for name, one in features.items()}}
    answer = await controller.http.put(f"{DRIFT}/baseline", json=body)
    assert answer.status_code == 200, answer.text


async def shown(controller: Controller, **params: str) -> dict[str, Any]:
    answer = await controller.http.get(DRIFT, params=params)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def events(controller: Controller) -> list[str]:
    with controller.context.store.read() as sql:
        return list(sql.execute(sa.select(tables.deliveries.c.event)).scalars())


def metric(controller: Controller, name: str) -> float | None:
    found = loop.series(controller.context.store, now=controller.clock())
    controller.context.metrics.set_drift(found)
    for line in generate_latest(controller.context.metrics.registry).decode().splitlines():
        if line.startswith(f"pilotlight_controller_{name}{{"):
            return float(line.rpartition(" ")[2])
    return None


async def test_planted_drift_is_found_by_the_end_of_its_window(deployed: Controller) -> None:
    await set_baseline(deployed)
    await hour_of(deployed, 1)
    assert metric(deployed, "drift_features") == 0
    # half a standard deviation, from the beginning of this hour on
    await hour_of(deployed, 2, age=lambda rng: rng.gauss(45, 10))
    found = await shown(deployed)
    last, before = found["windows"]
    assert [last["status"], before["status"]] == ["drift", "ok"]
    by_name = {one["feature"]: one for one in last["features"]}
    assert by_name["$.age"]["status"] == "drift"
    assert by_name["$.age"]["reasons"][0].startswith(("psi", "ks"))
    assert [by_name[name]["status"] for name in ("$.country", "prediction")] == ["ok", "ok"]
    assert metric(deployed, "drift_features") == 1
    assert (metric(deployed, "drift_psi") or 0) > 0.2
    await hour_of(deployed, 3)
    assert metric(deployed, "drift_features") == 0
    listed = (await deployed.http.get("/v1/drift")).json()["functions"]
    assert [one["last"]["status"] for one in listed] == ["ok"]


async def test_webhooks_hear_when_drift_begins_and_ends(deployed: Controller) -> None:
    answer = await deployed.http.put(
        "/v1/webhooks/ops", json={"url": "https://example.com/hook", "events": ["drift.*"]}
    )
    assert answer.status_code in (200, 201), answer.text
    await set_baseline(deployed)
    for number, (mean, n) in enumerate(((40, 600), (60, 600), (60, 20), (60, 600), (40, 600))):
        await hour_of(deployed, number, n=n, age=lambda rng, mean=mean: rng.gauss(mean, 10))
    assert events(deployed) == ["drift.detected", "drift.resolved"]


async def test_missing_and_impossible_values_are_drift(deployed: Controller) -> None:
    await set_baseline(deployed)
    await hour_of(deployed, 1, age=lambda rng: None if rng.random() < 0.2 else rng.gauss(40, 10))
    await hour_of(deployed, 2, age=lambda rng: -1 if rng.random() < 0.1 else rng.gauss(40, 10))
    impossible, missing = (await shown(deployed))["windows"]
    (age,) = [one for one in missing["features"] if one["feature"] == "$.age"]
    assert 0.15 < age["missing"] < 0.25
    assert age["reasons"][0].startswith("missing")
    (age,) = [one for one in impossible["features"] if one["feature"] == "$.age"]
    assert 0.05 < age["outside"] < 0.15
    assert any(reason.startswith("outside") for reason in age["reasons"])


async def test_a_sketch_is_counted_once_and_after_its_rows(deployed: Controller) -> None:
    lines = rows(200, revision=place(deployed)[1], at_s=deployed.clock())
    (early,) = await put(deployed, lines, 1, kinds="sketch")
    assert early.json() == {"stored": False}  # its rows were refused, or are deleted
    for _ in range(2):
        await put(deployed, lines, 1)
    assert (await shown(deployed))["current"]["rows"] == 200
    with deployed.context.store.read() as sql:
        assert sql.execute(sa.select(sa.func.count()).select_from(tables.drift_scores)).scalar()


async def test_only_whole_sketches_of_the_platform_are_counted(deployed: Controller) -> None:
    lines = rows(200, revision=place(deployed)[1], at_s=deployed.clock())
    await put(deployed, lines, 1, kinds="parquet")
    function, _ = place(deployed)
    name = f"{await deployed.tenant()}~{function}~{int(deployed.clock()) // HOUR_S}~{7 * DAY_S}"
    path = f"{PREDICTIONS_PATH}/{name}~{1:024x}~200.sketch"
    headers = {HEADER_PLATFORM_TOKEN: deployed.context.key.token}
    good = json.loads(monitoring.sketch(lines) or b"")
    for change in (
        b"{}",
        b"[" * 100_000,
        json.dumps({**good, "scores": [["a"]]}).encode(),
        json.dumps({**good, "revisions": {"v1": {"rows": -1, "features": {}}}}).encode(),
        bytes(sketch_store.MAX_BYTES + 1),
    ):
        answer = await deployed.http.put(path, content=change, headers=headers)
        refused(answer, 400)
    assert (await deployed.http.put(path, content=b"{}")).status_code == 403
    assert (await shown(deployed))["current"]["rows"] == 0


async def test_a_deleted_log_has_no_drift_and_no_bytes(deployed: Controller) -> None:
    async def used() -> int:
        return int((await deployed.http.get("/v1/tenant")).json()["use"]["stored_bytes"])

    before = await used()
    await put(deployed, rows(200, revision=place(deployed)[1], at_s=deployed.clock()), 1)
    assert await used() > before + 200 * sketch_store.SCORE_BYTES
    answer = await deployed.http.delete("/v1/apps/search/functions/hello/predictions")
    assert answer.status_code == 200, answer.text
    assert (await shown(deployed))["current"]["rows"] == 0
    loop.judge_all(deployed.context.store, now=deployed.clock())
    assert await used() == before + len(b"PAR1")  # which the janitor deletes


async def test_a_full_tenant_stores_no_sketch(deployed: Controller) -> None:
    lines = rows(200, revision=place(deployed)[1], at_s=deployed.clock())
    await put(deployed, lines, 1, kinds="parquet")
    used = (await deployed.http.get("/v1/tenant")).json()["use"]["stored_bytes"]
    await deployed.http.patch(
        "/v1/tenants/default", json={"overrides": {"stored_bytes": used + 10}}
    )
    (answer,) = await put(deployed, lines, 1, kinds="sketch")
    assert answer.json()["type"].endswith("storage-quota")
    assert (await shown(deployed))["current"]["rows"] == 0


async def test_quality_is_measured_by_slice_and_alarms_when_it_breaks(
    deployed: Controller,
) -> None:
    await set_baseline(deployed)
    lines = rows(600, revision=place(deployed)[1], at_s=deployed.clock())
    await put(deployed, lines, 1)
    truths = {}
    for line in lines:
        row = json.loads(line)
        score = row["watched"]["features"]["prediction"][0]
        is_german = row["watched"]["slices"] == ["DE"]
        # calibrated in France, and turned around in Germany
        likely = 1 - score if is_german else score
        truths[row["request_id"]] = (
            "fraud" if random.Random(row["request_id"]).random() < likely else "ok"
        )
    give_labels(deployed, truths, tenant=await deployed.tenant())
    found = {one["slice"]: one for one in (await shown(deployed))["current"]["quality"]}
    assert found.keys() == {"", "$.country=DE", "$.country=FR"}
    assert found["$.country=FR"]["calibration_error"] < 0.1
    assert found["$.country=DE"]["calibration_error"] > 0.3
    assert found["$.country=DE"]["broken"] == ["brier"]
    assert found["$.country=FR"]["broken"] == []
    measure = found[""]["measures"]["brier"]
    assert measure["low"] < measure["value"] < measure["high"]
    assert found[""]["labels"] == 600


def give_labels(controller: Controller, truths: Mapping[str, str], *, tenant: str) -> None:
    function, revision = place(controller)
    same = {"tenant": tenant, "function_id": function, "revision": revision}
    with controller.context.store.write() as write:
        write.sql.execute(
            sa.insert(tables.feedback),
            [
                {
                    **same,
                    **dict.fromkeys(("experiment", "arm", "unit"), ""),
                    "call": call,
                    "metric": "label",
                    "value": None,
                    "label": label,
                    "called_at": write.now,
                    "at": write.now,
                    "reach": "{}",
                }
                for call, label in truths.items()
            ],
        )


async def test_two_revisions_are_compared(deployed: Controller) -> None:
    _, revision = place(deployed)
    await put(deployed, rows(400, revision=revision, at_s=deployed.clock(), seed=1), 1)
    await put(deployed, rows(400, revision="v0-aaaaaa", at_s=deployed.clock(), seed=2), 2)
    found = (await shown(deployed, revision=revision, against="v0-aaaaaa"))["contrast"]
    assert found["rows"] == [400, 400]
    assert found["prediction_ks"] < 0.12
    assert found["prediction_ks_low"] == 0
    answer = await deployed.http.get(DRIFT, params={"revision": revision})
    assert "neither" in refused(answer, 400)
    for pair in (("v0-bbbbbb", revision), (revision, "v0-bbbbbb")):
        params = dict(zip(("revision", "against"), pair, strict=True))
        said = refused(await deployed.http.get(DRIFT, params=params), 404)
        assert f"search/hello has no revision 'v0-bbbbbb': the newest are {revision}" in said


async def test_a_baseline_comes_from_a_time_of_the_log(deployed: Controller) -> None:
    lines = rows(400, revision=place(deployed)[1], at_s=deployed.clock())
    await put(deployed, lines, 1)
    now = deployed.clock()
    times = {"since": str(now - HOUR_S), "until": str(now + 1)}
    answer = await deployed.http.put(f"{DRIFT}/baseline", json=times)
    assert answer.json()["rows"] == 400, answer.text
    audit = await deployed.http.get("/v1/audit", params={"action": "drift.baseline"})
    assert audit.json()["entries"][0]["subject"] == "main/search/hello"
    early = {"since": str(now - 9 * HOUR_S), "until": str(now - 8 * HOUR_S)}
    assert "needs 100 rows" in refused(
        await deployed.http.put(f"{DRIFT}/baseline", json=early), 400
    )
    other = {"rows": 500, "features": {"$.x": Sketch.of([1.0]).to_json()}}
    assert "no feature" in refused(await deployed.http.put(f"{DRIFT}/baseline", json=other), 400)
    assert "give since" in refused(await deployed.http.put(f"{DRIFT}/baseline", json={}), 400)
    other["features"] = {"$.age": {**Sketch.of([1.0]).to_json(), "low": 2**1024}}
    assert "not a sketch" in refused(await deployed.http.put(f"{DRIFT}/baseline", json=other), 400)


async def test_a_baseline_is_counted_while_others_write(
    deployed: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(deployed, rows(400, revision=place(deployed)[1], at_s=deployed.clock()), 1)
    count = sketch_store.window

    def write() -> None:
        with deployed.context.store.write():
            pass

    def counted_meanwhile(*args: Any, **named: Any) -> FeatureCounts:
        other = threading.Thread(target=write, daemon=True)
        other.start()
        other.join(5.0)
        assert not other.is_alive(), "it waits for the baseline"
        return count(*args, **named)

    monkeypatch.setattr(sketch_store, "window", counted_meanwhile)
    now = deployed.clock()
    times = {"since": str(now - HOUR_S), "until": str(now + 1)}
    answer = await deployed.http.put(f"{DRIFT}/baseline", json=times)
    assert answer.json()["rows"] == 400, answer.text


def test_a_sketch_that_no_database_takes_is_refused_for_good() -> None:
    body: dict[str, Any]
    for predicted, slices in ((2**1024, []), ("\ud800", []), ("a", ["\ud800"]), ("\0", [])):
        body = {"revisions": {}, "scores": [["call-1", "v1", 0.0, predicted, slices]]}
        with pytest.raises(InvalidInput, match="not a sketch"):
            sketch_store.SketchFile.parse(json.dumps(body).encode())
    sketch = {**Sketch.of(["a"]).to_json(), "categories": {"\ud800": 1}}
    body = {"revisions": {"v1": {"rows": 1, "features": {"$.x": sketch}}}, "scores": []}
    with pytest.raises(InvalidInput, match="drift: "):
        sketch_store.SketchFile.parse(json.dumps(body).encode())


async def test_the_window_before_may_be_the_reference(controller: Controller) -> None:
    await deploy(controller, monitor={**to_json(TERMS), "reference": "previous"})
    await hour_of(controller, 1)
    await hour_of(controller, 2, age=lambda rng: rng.gauss(60, 10))
    assert [one["status"] for one in (await shown(controller))["windows"]] == [
        "drift",
        "no_reference",
    ]


async def test_another_tenant_sees_and_sets_nothing(deployed: Controller) -> None:
    async with deployed.client(await deployed.other_tenant()) as other:
        assert (await other.get("/v1/drift")).json() == {"functions": []}
        assert (await other.get(DRIFT)).status_code == 404
        body = {"rows": 500, "features": {"prediction": Sketch.of([1.0]).to_json()}}
        assert (await other.put(f"{DRIFT}/baseline", json=body)).status_code == 404


async def test_a_killed_controller_judges_a_window_once(deployed: Controller) -> None:
    await set_baseline(deployed)
    await hour_of(deployed, 1, age=lambda rng: rng.gauss(70, 5))
    store = deployed.context.store
    with store.read() as sql:
        (target,) = find_targets(sql)
    loop.judge(store, target, now=deployed.clock())  # killed before it was stored, and again
    assert loop.judge_all(store, now=deployed.clock()) == 0
    assert len((await shown(deployed))["windows"]) == 1


def counted(rng: random.Random, n: int, features: int) -> FeatureCounts:
    return FeatureCounts(
        rows=n,
        features={
            f"$.f{number}": Sketch.of([rng.gauss(0, 1) for _ in range(n)])
            for number in range(features)
        },
    )


def test_a_stationary_stream_raises_no_more_than_alpha() -> None:
    """The bounds of the effects are set so low that the p-values alone decide."""
    features = 2
    terms = MonitorSpec(
        features=tuple(MonitoredFeature(path=f"$.f{n}") for n in range(features)),
        min_rows=100,
        psi=0.01,
        ks=0.01,
        shares=0.001,
        alpha=0.1,
    )
    rng = random.Random(11)
    windows, false = 40, 0
    for _ in range(windows):
        reference, current = counted(rng, 200, features), counted(rng, 200, features)
        report = compare(terms, reference, current, since_h=0, until_h=1)
        false += report.status is DriftStatus.DRIFT
    # three standard errors above alpha
    assert false <= windows * 0.1 + 3 * (windows * 0.1 * 0.9) ** 0.5


def test_small_windows_and_unknown_features_are_no_drift() -> None:
    terms = MonitorSpec(features=(MonitoredFeature(path="$.f0"), MonitoredFeature(path="$.new")))
    rng = random.Random(12)
    few, many = counted(rng, 100, 1), counted(rng, 600, 1)
    for reference, current, status in (
        (many, few, DriftStatus.NO_DATA),
        (None, many, DriftStatus.NO_REFERENCE),
        (few, many, DriftStatus.NO_REFERENCE),
        (many, many, DriftStatus.OK),
    ):
        report = compare(terms, reference, current, since_h=0, until_h=1)
        assert report.status is status
    assert [one.status for one in report.features] == [DriftStatus.OK, DriftStatus.NO_REFERENCE]


async def test_the_dashboard_shows_functions_and_their_features(deployed: Controller) -> None:
    session = await sign_in(deployed, deployed.key)

    async def page(path: str) -> str:
        answer = await deployed.client(None).get(path, headers=session)
        assert answer.status_code == 200, answer.text
        return answer.text

    assert "no window of 1 h was judged" in await page("/dashboard/drift")
    await set_baseline(deployed)
    await hour_of(deployed, 1, age=lambda rng: rng.gauss(70, 5))
    assert "$.age" in await page("/dashboard/drift")
    detail = await page("/dashboard/drift/search/hello")
    assert "psi " in detail
    assert ", from 0.25 on" in detail
    answer = await deployed.client(None).get("/dashboard/drift/search/none", headers=session)
    assert answer.status_code == 404


async def test_a_gate_needs_what_it_looks_at(deployed: Controller) -> None:
    async def roll_out(metric: str, **changes: Any) -> httpx.Response:
        body = {
            "functions": [spec(description=metric, **changes)],
            "rollout": {"gates": [{"metric": metric}]},
        }
        return await deployed.http.post("/v1/apps/search/deploy", json=body)

    for metric in ("prediction_ks", "quality:brier"):
        assert "is not deployed with monitor" in refused(await roll_out(metric), 400)
    assert (await roll_out("prediction_ks", log=LOG)).status_code == 200
    found = (await deployed.http.get("/v1/rollouts")).json()["rollouts"]
    assert [one["state"] for one in found] == ["running"]
    (rollout,) = [one["id"] for one in found]
    lines = [
        rows(500, revision=found[0][which], at_s=deployed.clock(), seed=number)
        for number, which in enumerate(("candidate", "stable"))
    ]
    for number, some in enumerate(lines):
        await put(deployed, some, number + 1)
    detail = (await deployed.http.get(f"/v1/rollouts/{rollout}")).json()
    (gate,) = detail["now"]["gates"]
    assert (gate["outcome"], gate["samples"]) == ("pass", 500)
