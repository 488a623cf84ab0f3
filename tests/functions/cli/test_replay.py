"""`pilotlight replay` against the real control plane, where calls have no data plane: what it refuses
before it calls, and what it leaves behind."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

import httpx
import pytest
import sqlalchemy as sa
from typer.testing import CliRunner, Result

from activator.prediction_log import parquet
from activator.prediction_log.writer import make_row
from pilotlight.cli.commands.calls.replay import render
from pilotlight.cli.main import build
from pilotlight.controller.database import tables
from pilotlight.core.terminal import terminal_of
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from pilotlight.protocol import PREDICTIONS_PATH
from pilotlight.replay.report import ReplayReport
from tests.activator.prediction_log.rows import logged
from tests.fakes.served_controller import ServedController
from tests.functions.controller.parts import BUNDLE, BUNDLE_DIGEST, spec
from tests.functions.replay.test_report import answered

KEY = b"k" * 32


@pytest.fixture(name="platform", scope="module")
def _platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedController]:
    """A function of two revisions, of which the second can be called by its name only, and two rows
    in its log."""
    with ServedController(tmp_path_factory.mktemp("log")) as platform:
        platform.now = time.time()
        with platform.client() as client:
            client.put_blob(BUNDLE_DIGEST, BUNDLE)
            tenant = client.whoami()["tenant"]["id"]
        headers = {"authorization": f"Bearer {platform.key}"}
        for memory, is_first in ((2**28, True), (2**29, False)):
            body = {
                "functions": [spec(log={"sample": 1.0}, resources={"memory_bytes": memory})],
                "no_traffic": not is_first,
            }
            answer = httpx.post(f"{platform.url}/v1/apps/shop/deploy", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
        with platform.store.read() as sql:
            function = sql.execute(sa.select(tables.functions.c.id)).scalar_one()
        data, rows = parquet.convert(
            make_row(logged(number, at_ns=time.time_ns() - 10**9), KEY) for number in (1, 2)
        )
        hour = int(time.time()) // 3600
        name = f"{tenant}~{function}~{hour}~86400~{1:024x}~{rows}.parquet"
        answer = httpx.put(
            f"{platform.url}{PREDICTIONS_PATH}/{name}",
            content=data,
            headers={HEADER_PLATFORM_TOKEN: platform.token},
        )
        assert answer.json() == {"stored": True}, answer.text
        yield platform


def run(platform: ServedController, *words: str) -> Result:
    return CliRunner().invoke(
        build(), ["replay", *words], env=platform.environ(None), prog_name="pilotlight"
    )


def test_an_unknown_revision_is_refused_with_those_that_there_are(
    platform: ServedController,
) -> None:
    done = run(platform, "shop/hello", "--on", "v9")
    assert done.exit_code == 1
    assert "no revision, alias or tag 'v9'" in done.stderr


@pytest.mark.parametrize(
    "words, said",
    [
        (("--since", "2020-01-01", "--until", "2020-01-02"), "has no logged calls"),
        (("--version", "v7"), "no logged calls that --since"),
        (("--from", "nowhere.jsonl"), "no such file"),
        (("--ignore", "x.y"), "must begin with $"),
        (("--out", "/nowhere/out.jsonl"), "/nowhere/out.jsonl"),
    ],
)
def test_a_replay_without_rows_calls_nothing(
    platform: ServedController, words: tuple[str, ...], said: str
) -> None:
    done = run(platform, "shop/hello", "--on", "v1", *words)
    assert done.exit_code == 1, done.output
    assert said in done.stderr


def test_a_revision_that_cannot_be_called_is_tagged_meanwhile_and_never_longer(
    platform: ServedController,
) -> None:
    def tags() -> dict[str, str]:
        with platform.client() as client:
            found = client.traffic("shop", "hello")
        return dict(found["tags"])

    assert tags() == {}
    done = run(platform, "shop/hello", "--on", "v2", "--json")
    assert done.exit_code == 1, done.output  # the controller serves no calls
    assert tags() == {}
    with platform.client() as client:
        history = client.history("shop")
    changed = [one for one in history if one["message"] == "pilotlight replay"]
    assert len(changed) == 2
    found = json.loads(done.stdout)
    assert (found["rows"], found["compared"], found["failed"]) == (2, 0, 2)


def test_a_report_is_shown_as_tables(capsys: pytest.CaptureFixture[str]) -> None:
    report = ReplayReport()
    report.add(answered({"label": "\x1b[31mred", "p": 1.0}, {"label": "blue", "p": 0.9}))
    report.stopped = "interrupted"
    found = {"target": "shop/hello", "revision": "v2-bb", "rows": 12, **report.to_json()}
    terminal_of(sys.stdout).print(render(found))
    shown = capsys.readouterr().out
    assert "stopped: interrupted" in shown
    assert "shop/hello v2-bb: called 1 of 12 logged calls" in shown
    assert "1 compared: 0 equal, 1 different (100 %)" in shown
    assert "up to 10 %" in shown
    assert "cost" in shown
    assert "\x1b" not in shown
