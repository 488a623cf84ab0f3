"""`pilotlight drill`: each part fails on a running platform, and nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
import yaml

from pilotlight.core.settings import PlatformSettings
from tests.conftest import RequireOrSkip
from tests.e2e.harness import PlatformUnderTest, platform_up
from tests.fakes import postgres_server
from tests.fakes.postgres_server import PostgresServer

pytestmark = pytest.mark.slow  # each drill calls a function for seconds
APP = """import pilotlight

app = pilotlight.App("drilled")


@app.function(example={"n": 2})
def double(n: int) -> int:
    return 2 * n
"""
GROUP = PlatformSettings().activator_uid
TIMES = ("--before", "0.5s", "--for", "1s", "--after", "0.5s", "--rate", "30")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drilled:
    """A platform with a function, and commands that stop and start its services."""

    platform: PlatformUnderTest
    services: dict[str, tuple[str, str]]


@pytest.fixture(scope="module")
def drilled(redis_server: str, require_or_skip: RequireOrSkip) -> Iterator[Drilled]:
    """With a Redis, and a PostgreSQL with a standby, each of its own."""
    binaries = postgres_server.programs()
    if binaries is None:
        require_or_skip("PostgreSQL's server is not installed")
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pldr")))
        root.chmod(0o755)
        first, second = _postgres(root, binaries, stack)
        redis = (
            f"redis-server --port 0 --unixsocket {root}/q.sock --unixsocketperm 770 --save '' "
            f"--daemonize yes --pidfile {root}/q.pid --logfile {root}/q.log "
            f"&& until [ -S {root}/q.sock ]; do sleep 0.05; done && chgrp {GROUP} {root}/q.sock"
        )
        subprocess.run(["sh", "-c", redis], check=True)
        stack.callback(subprocess.run, ["sh", "-c", f"kill -9 $(cat {root}/q.pid)"], check=False)
        promote = f"import psycopg; psycopg.connect('{second.url}').execute('SELECT pg_promote()')"
        platform = stack.enter_context(
            platform_up(
                activator={"redis_url": f"unix://{root}/q.sock"},
                controller={
                    "database_url": "postgresql+psycopg://postgres@/billing"
                    f"?host={first.home}&host={second.home}&target_session_attrs=read-write"
                },
            )
        )
        file = root / "app" / "app.py"
        file.parent.mkdir()
        file.write_text(APP)
        assert platform.cli("deploy", str(file)).returncode == 0
        yield Drilled(
            platform=platform,
            services={
                "redis": (f"kill -9 $(cat {root}/q.pid) && rm {root}/q.sock", redis),
                "postgres": (f"kill -9 -{first.pid}", f'{sys.executable} -c "{promote}"'),
            },
        )


def _postgres(
    root: Path, binaries: Path, stack: ExitStack
) -> tuple[PostgresServer, PostgresServer]:
    homes = [root / "p1", root / "p2"]
    for home in homes:
        home.mkdir()
    first = PostgresServer(homes[0], binaries, replicates=True)
    first.start()
    stack.callback(first.stop)
    with psycopg.connect(first.url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE billing")
    second = PostgresServer(homes[1], binaries, replicates=True, of=homes[0])
    second.start()
    stack.callback(second.stop)
    first.wait_for_standby()
    return first, second


# in this order: the standby can be promoted once
@pytest.mark.parametrize(
    "fault",
    [
        "activator",
        "controller",
        "node",
        "bad-route",
        "oom",
        "weight-storm",
        "redis",
        "postgres",
    ],
)
def test_what_fails_comes_back_and_nothing_is_lost(drilled: Drilled, fault: str) -> None:
    stop, start = drilled.services.get(fault, ("", ""))
    commands = ("--stop", stop, "--start", start) if stop else ()
    done = drilled.platform.cli(
        "drill", fault, "drilled/double", *TIMES, *commands, "--yes", "--json"
    )
    assert done.returncode == 0, done.stdout + done.stderr + drilled.platform.log_tails(40)
    report = json.loads(done.stdout)
    assert report["passed"]
    assert report["records_checked"] >= 10
    assert (report["rpo_s"], report["records_missing"], report["submitted_lost"]) == (0.0, [], [])
    assert 0 < report["rto_s"] < 60
    with drilled.platform.client() as client:
        assert [app["name"] for app in client.apps()] == ["drilled"]


def test_nothing_fails_without_consent_nor_in_production(drilled: Drilled, tmp_path: Path) -> None:
    platform = drilled.platform
    before = platform.pid("controller")
    asked = platform.cli("drill", "controller", "drilled/double", check=False)
    assert asked.returncode == 1
    assert "--yes" in asked.stderr
    config = platform.local.config
    kept = config.read_text()
    sections = yaml.safe_load(kept)
    sections["platform"]["production"] = True
    config.write_text(yaml.safe_dump(sections))
    try:
        refused = platform.cli("drill", "controller", "drilled/double", "--yes", check=False)
    finally:
        config.write_text(kept)
    assert refused.returncode == 1
    assert "platform.production: true" in refused.stderr
    home = tmp_path / "h"
    away = platform.cli(
        "drill", "controller", "drilled/double", "--yes", "--home", str(home), check=False
    )
    assert away.returncode == 1
    assert f"no platform runs in {home}" in away.stderr
    assert platform.pid("controller") == before
