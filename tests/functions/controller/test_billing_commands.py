"""`pilotlight billing …`, against a controller in this process."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import uvicorn
from typer.testing import CliRunner, Result

from pilotlight.cli.main import build
from pilotlight.controller import http_app
from pilotlight.controller.database import tables
from pilotlight.controller.usage_archive.archive_file import object_key
from pilotlight.controller.usage_archive.archiver import UsageArchiver
from tests.fakes.quiet_server import QuietServer
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import usage

OCTOBER = 1_790_812_800.0  # 2026-10-01, UTC


class Shell:
    """Types commands in a thread, while the controller answers in this one."""

    def __init__(self, url: str, key: str, home: Path) -> None:
        self._environ = {
            "PILOTLIGHT_URL": url,
            "PILOTLIGHT_API_KEY": key,
            "HOME": str(home),
            "NO_COLOR": "1",
        }

    async def run(self, *words: str) -> Result:
        """`pilotlight billing <words>`."""
        arguments = ["billing", *words]
        return await asyncio.to_thread(
            lambda: CliRunner().invoke(
                build(), arguments, env=self._environ, prog_name="pilotlight"
            )
        )

    async def ok(self, *words: str) -> str:
        """What it prints."""
        done = await self.run(*words)
        assert done.exit_code == 0, done.output
        return done.stdout

    async def json(self, *words: str) -> Any:
        """The same as JSON."""
        return json.loads(await self.ok(*words, "--json"))


@pytest.fixture(name="shell")
async def _shell(controller: Controller, tmp_path: Path) -> AsyncIterator[Shell]:
    settings = uvicorn.Config(
        http_app.build_app(controller.context),
        lifespan="off",
        log_config=None,
        access_log=False,
        ws="none",
    )
    server = QuietServer(settings)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        tenant = await controller.tenant()
        records = [
            usage("req-1/1", tenant=tenant, started_at=OCTOBER, cost="1.5"),
            usage("req-2/1", tenant=tenant, started_at=OCTOBER + 1, cost="0.25", function="@rank"),
        ]
        body = {"activator": "a-0", "records": [one.to_json() for one in records]}
        assert (await controller.internal("/internal/usage", body)).status_code == 200
        yield Shell(f"http://127.0.0.1:{listener.getsockname()[1]}", controller.key, tmp_path)
        server.should_exit = True
        await serving


async def test_a_report_by_whatever_is_asked(shell: Shell) -> None:
    assert "total 1.75 USD" in await shell.ok("report")
    assert [row["cost"] for row in (await shell.json("report", "--by", "tag:team"))["rows"]] == [
        "1.75"
    ]
    rows = list(csv.DictReader(io.StringIO(await shell.ok("report", "--by", "function", "--csv"))))
    assert [(row["function"], row["cost"]) for row in rows] == [
        ("'@rank", "0.25"),
        ("embed", "1.5"),
    ]
    done = await shell.run("report", "--by", "colour")
    assert (done.exit_code, "by" in done.output) == (1, True)


@pytest.mark.slow  # runs fifteen commands
async def test_from_the_draft_to_the_file_of_an_invoice(shell: Shell, tmp_path: Path) -> None:
    (draft,) = (await shell.json("invoice", "list"))["invoices"]
    assert (draft["month"], draft["status"], draft["total"]) == (
        "2026-10",
        "draft",
        "1.750000000000",
    )
    assert "a draft, which changes until it is issued" in await shell.ok(
        "invoice", "show", "2026-10"
    )
    (made,) = (await shell.json("invoice", "issue", "2026-10", "--tenant", "default"))["invoices"]
    assert "No invoice to issue" in await shell.ok("invoice", "issue", "2026-10")
    shown = await shell.ok("invoice", "show", made["id"])
    assert ("total 1.75 USD" in shown, "search/embed" in shown) == (True, True)
    file = tmp_path / "bill.csv"
    assert (await shell.json("invoice", "download", made["id"], "--to", str(file)))[
        "size_bytes"
    ] == file.stat().st_size
    assert [row["cost"] for row in csv.DictReader(io.StringIO(file.read_text()))] == [
        "0.250000000000",
        "1.500000000000",
    ]
    assert (
        json.loads(
            await shell.ok("invoice", "download", "2026-10", "--format", "json", "--to", "-")
        )["id"]
        == made["id"]
    )
    assert (await shell.run("invoice", "show", "2026-09")).exit_code == 1


async def test_records_are_exported_and_one_is_corrected(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "records.ndjson"
    await shell.ok("export", "--to", str(file), "--since", "2026-09-30")
    assert [json.loads(line)["id"] for line in file.read_text().splitlines()] == [
        "req-1/1",
        "req-2/1",
    ]
    assert [
        json.loads(line)["id"]
        for line in (await shell.ok("export", "--cursor", "req-1/1")).splitlines()
    ] == ["req-2/1"]
    assert "-0.5 USD on req-1/1" in await shell.ok(
        "correct", "req-1/1", "--amount=-0.5", "--note", "twice"
    )
    done = await shell.run("correct", "req-1/1", "--amount=-1.1", "--note", "too much")
    assert (done.exit_code, "credit cannot exceed that" in done.output) == (1, True)
    assert "twice" in await shell.ok("invoice", "show", "2026-10")


async def test_rates_are_those_that_apply(shell: Shell) -> None:
    assert (await shell.json("rates"))["current"]["cpu_core_s"] == "0.0000131"
    assert "version 2026-11-26, USD" in await shell.ok("rates")


async def test_sums_that_are_off_fail_the_verification_until_they_are_rebuilt(
    shell: Shell, controller: Controller
) -> None:
    assert "2 records; all sums match" in await shell.ok("verify")
    with controller.context.store.write() as write:
        write.sql.execute(sa.update(tables.usage_days).values(records=9))
    done = await shell.run("verify")
    assert (done.exit_code, "--rebuild" in done.output) == (1, True)
    assert "all sums match" in await shell.ok("verify", "--rebuild")


async def test_archives_and_invoices_that_were_changed_fail_the_verification(
    shell: Shell, controller: Controller
) -> None:
    await shell.ok("invoice", "issue", "2026-10")
    archiver = UsageArchiver(
        controller.context.store, controller.context.files.objects, days=90, clock=controller.clock
    )
    while await archiver.archive_next():
        pass
    assert "2 records, 2 of them in 1 archives whose chain is whole" in await shell.ok("verify")
    objects, key = controller.context.files.objects, object_key(1)
    whole = await objects.get(key, max_bytes=10**6)
    await objects.put(key, whole[:-1])
    done = await shell.run("verify", "--json")
    assert (done.exit_code, "archive 1 is cut off" in done.output) == (1, True)
    await objects.delete(key)
    assert "archive 1 is missing" in (await shell.run("verify")).output.replace("\n", " ")
    await objects.put(key, whole)
    with controller.context.store.write() as write:
        write.sql.execute(sa.update(tables.invoices).values(total="7.000000000000"))
    done = await shell.run("verify")
    assert (done.exit_code, "invoices differ from their records" in done.output) == (1, True)
