"""`pilotlight drift` against the real control plane."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
from typer.testing import CliRunner, Result

from activator.prediction_log import monitoring
from pilotlight.cli.main import build
from pilotlight.controller.database import tables
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from pilotlight.protocol import PREDICTIONS_PATH
from pilotlight.spec.monitor import MonitoredFeature, MonitorSpec
from pilotlight.spec.record_json import to_json
from tests.fakes.served_controller import ServedController
from tests.functions.controller.parts import BUNDLE, BUNDLE_DIGEST, spec
from tests.functions.controller.test_drift import rows

TERMS = MonitorSpec(
    features=(MonitoredFeature(path="$.age", low=0, high=120), MonitoredFeature(path="$.country")),
    prediction="$.score",
    label="label",
    positive="fraud",
    slices=("$.country",),
    min_rows=100,
)


@pytest.fixture(name="platform", scope="module")
def _platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedController]:
    """A function with 300 watched calls in this hour."""
    with ServedController(tmp_path_factory.mktemp("drift")) as platform:
        platform.now = time.time()
        with platform.client() as client:
            client.put_blob(BUNDLE_DIGEST, BUNDLE)
            tenant = client.whoami()["tenant"]["id"]
        headers = {"authorization": f"Bearer {platform.key}"}
        body = {"functions": [spec(log={"sample": 1.0, "monitor": to_json(TERMS)}), spec("plain")]}
        answer = httpx.post(f"{platform.url}/v1/apps/shop/deploy", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        c = tables.functions.c
        with platform.store.read() as sql:
            function = sql.execute(sa.select(c.id).where(c.name == "hello")).scalar_one()
        lines = rows(300, revision="v1", at_s=platform.now, age=lambda rng: rng.gauss(60, 10))
        hour = int(platform.now) // 3600
        name = f"{tenant}~{function}~{hour}~86400~{1:024x}~300"
        for kind, data in (("parquet", b"PAR1"), ("sketch", monitoring.sketch(lines))):
            url = f"{platform.url}{PREDICTIONS_PATH}/{name}.{kind}"
            token = {HEADER_PLATFORM_TOKEN: platform.token}
            answer = httpx.put(url, content=data or b"", headers=token)
            assert answer.json() == {"stored": True}, answer.text
        yield platform


def run(platform: ServedController, *words: str) -> Result:
    return CliRunner().invoke(
        build(), ["drift", *words], env=platform.environ(None), prog_name="pilotlight"
    )


def training(path: Path, *, mean: float, n: int = 400) -> Path:
    rng = random.Random(1)
    path.write_text(
        "".join(
            json.dumps(
                {
                    "input": {"age": rng.gauss(mean, 10), "country": rng.choice(("DE", "FR"))},
                    "output": {"score": rng.random()},
                }
            )
            + "\n"
            for _ in range(n)
        )
    )
    return path


def test_a_file_of_rows_becomes_the_baseline(platform: ServedController, tmp_path: Path) -> None:
    file = training(tmp_path / "rows.jsonl", mean=40)
    done = run(platform, "baseline", "shop/hello", "--from", str(file))
    assert done.exit_code == 0, done.output
    assert "400 rows" in done.output
    found = json.loads(run(platform, "show", "shop/hello", "--json").stdout)
    assert found["current"]["status"] == "drift"
    by_name = {one["feature"]: one for one in found["current"]["features"]}
    assert by_name["$.age"]["ks"] > 0.5
    text = run(platform, "show", "shop/hello").output
    assert "$.age" in text
    assert "so far" in text
    assert "psi" in text


def test_a_time_of_the_log_becomes_the_baseline(platform: ServedController) -> None:
    done = run(platform, "baseline", "shop/hello", "--since", "1h", "--json")
    assert json.loads(done.stdout)["rows"] == 300, done.output
    found = json.loads(run(platform, "show", "shop/hello", "--json").stdout)
    assert found["current"]["status"] == "ok"


def test_functions_are_listed(platform: ServedController) -> None:
    assert "shop/hello" in run(platform, "list").output
    assert [one["function"] for one in json.loads(run(platform, "list", "--json").stdout)] == [
        "hello"
    ]


def test_revisions_are_compared(platform: ServedController) -> None:
    words = ("show", "shop/hello", "--revision", "v1", "--against", "v1")
    done = run(platform, *words)
    assert "v1 against v1: [300, 300] rows" in done.output
    assert "predictions: KS 0, at least 0" in done.output


@pytest.mark.parametrize(
    "words, message",
    [
        (("show", "shop/plain"), "is not monitored"),
        (("show", "shop"), "APP/FUNCTION"),
        (("baseline", "shop/hello"), "give --from"),
        (("baseline", "shop/hello", "--until", "1h"), "give --from"),
        (("baseline", "shop/hello", "--from", "/none"), "No such file"),
        (("show", "shop/hello", "--revision", "v1"), "neither"),
    ],
)
def test_mistakes_have_an_answer(
    platform: ServedController, words: tuple[str, ...], message: str
) -> None:
    done = run(platform, *words)
    assert done.exit_code != 0
    assert message in " ".join(done.output.split())


def test_a_damaged_file_is_refused_with_its_line(
    platform: ServedController, tmp_path: Path
) -> None:
    file = training(tmp_path / "rows.jsonl", mean=40, n=2)
    file.write_text(file.read_text() + "{}\n")
    done = run(platform, "baseline", "shop/hello", "--from", str(file))
    assert "line 3" in " ".join(done.output.split())
    few = training(tmp_path / "few.jsonl", mean=40, n=50)
    assert "needs 100 rows" in " ".join(
        run(platform, "baseline", "shop/hello", "--from", str(few)).output.split()
    )
