"""`pilotlight log` against the real control plane: queries run here, on this tenant's files only."""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
from typer.testing import CliRunner, Result

from activator.prediction_log import parquet
from activator.prediction_log.writer import make_row
from pilotlight.cli.core.prediction_query import query_predictions
from pilotlight.cli.main import build
from pilotlight.client.resources.predictions import _extract
from pilotlight.controller.database import tables
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from pilotlight.errors import InvalidInput, Unavailable
from pilotlight.protocol import PREDICTIONS_PATH
from tests.activator.prediction_log.rows import logged
from tests.fakes.served_controller import ServedController
from tests.functions.controller.parts import BUNDLE, BUNDLE_DIGEST, spec

KEY = b"k" * 32


@pytest.fixture(name="platform", scope="module")
def _platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedController]:
    """A function with two rows in its log."""
    with ServedController(tmp_path_factory.mktemp("log")) as platform:
        platform.now = time.time()
        with platform.client() as client:
            client.put_blob(BUNDLE_DIGEST, BUNDLE)
            tenant = client.whoami()["tenant"]["id"]
        headers = {"authorization": f"Bearer {platform.key}"}
        body = {"functions": [spec(log={"sample": 1.0})]}
        answer = httpx.post(f"{platform.url}/v1/apps/shop/deploy", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        with platform.store.read() as sql:
            function = sql.execute(sa.select(tables.functions.c.id)).scalar_one()
        data, rows = parquet.convert(
            make_row(logged(number, body=b'{"x":"\\u001b[31m%d"}' % number), KEY)
            for number in (1, 2)
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


def run(platform: ServedController, *words: str, key: str | None = None) -> Result:
    return CliRunner().invoke(
        build(), ["log", *words], env=platform.environ(key), prog_name="pilotlight"
    )


def test_a_query_is_answered_as_a_table_and_as_json(platform: ServedController) -> None:
    sql = "select count(*) as calls, sum(cost) as cost from predictions"
    done = run(platform, "query", "shop/hello", sql)
    assert done.exit_code == 0, done.output
    assert done.stdout.split() == ["calls", "cost", "2", "0.000002469134"]
    found = json.loads(run(platform, "query", "shop/hello", sql, "--json").stdout)
    assert found == {"rows": [{"calls": 2, "cost": "0.000002469134"}], "more": False}


def test_a_long_result_is_cut_and_says_so(platform: ServedController) -> None:
    words = ("query", "shop/hello", "select request_id from predictions order by 1")
    done = run(platform, *words, "--limit", "1")
    assert "req-2" not in done.stdout
    assert "--limit" in done.stderr
    assert json.loads(run(platform, *words, "--limit", "1", "--json").stdout)["more"] is True


def test_what_callers_wrote_does_not_control_the_terminal(platform: ServedController) -> None:
    done = run(
        platform, "query", "shop/hello", "select json_extract_string(input, '$.x') from predictions"
    )
    assert done.exit_code == 0, done.output
    assert "[31m1" in done.stdout
    assert "\x1b" not in done.stdout


def test_another_tenant_finds_nothing(platform: ServedController) -> None:
    headers = {"authorization": f"Bearer {platform.key}"}
    made = httpx.post(f"{platform.url}/v1/tenants", json={"name": "acme"}, headers=headers)
    key = made.json()["key"]["secret"]
    done = run(platform, "query", "shop/hello", "select * from predictions", key=key)
    assert done.exit_code == 1
    assert "has no logged calls" in done.stderr


def test_files_are_downloaded_by_hour(platform: ServedController, tmp_path: Path) -> None:
    done = run(platform, "download", "shop/hello", str(tmp_path / "new"), "--json")
    (path,) = json.loads(done.stdout)["files"]
    hour = time.strftime("%Y-%m-%dT", time.gmtime())
    assert Path(path).parent.name.startswith(hour)
    assert Path(path).read_bytes()[:4] == b"PAR1"
    assert run(platform, "download", "shop", str(tmp_path)).exit_code == 1


def test_a_log_is_deleted_after_a_question(platform: ServedController) -> None:
    refused = run(platform, "delete", "shop/hello")
    assert refused.exit_code == 1
    assert "--yes" in refused.stderr
    done = run(platform, "delete", "shop/hello", "--until", "2d", "--yes", "--json")
    assert json.loads(done.stdout) == {"files": 0, "rows": 0}


@pytest.mark.parametrize(
    "sql",
    [
        "select * from read_text('/etc/passwd')",
        "copy (select 1) to '{outside}/stolen.csv'",
        "select * from read_parquet('https://example.com/x.parquet')",
        "attach '{outside}/other.db'",
        "install httpfs",
        "set enable_external_access = true",
        "set memory_limit = '1TB'",
        "selec",
    ],
)
def test_a_statement_reaches_no_other_file_and_no_network(
    platform: ServedController, tmp_path: Path, sql: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    with platform.client() as client:
        inside = tmp_path / "inside"
        found = client.download_predictions("shop", "hello", inside)
    assert query_predictions(found, inside, "select 1 from predictions", limit=5).rows == [
        (1,),
        (1,),
    ]
    with pytest.raises(InvalidInput, match="the query failed"):
        query_predictions(found, inside, sql.format(outside=outside), limit=5)
    assert not list(outside.iterdir())


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    torn = tmp_path / "torn.parquet"
    torn.write_bytes(b"PAR1 torn PAR1")
    with pytest.raises(InvalidInput, match=r"torn\.parquet"):
        query_predictions([torn], tmp_path, "select 1 from predictions", limit=1)


def test_without_duckdb_the_error_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "duckdb", None)
    with pytest.raises(InvalidInput, match="need duckdb") as refusal:
        query_predictions([], tmp_path, "select 1", limit=1)
    assert "pilotlight[predictions]" in str(refusal.value.detail)


@pytest.mark.parametrize("name", ["../../evil.parquet", "/etc/evil.parquet", "2026-11-30T10/x.sh"])
def test_nothing_else_of_an_archive_is_written(tmp_path: Path, name: str) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))
    archive.seek(0)
    with pytest.raises(Unavailable, match="incomplete"):
        _extract(archive, tmp_path / "d")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
