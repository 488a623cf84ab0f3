"""The control plane for other machines: mutual TLS, a second controller that stands by, and what
probes are told. Real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa

from pilotlight.controller.server.bootstrap import first_admin_key
from pilotlight.controller.server.database_lock import AlreadyRunning, ControllerLock
from pilotlight.controller.server.health import Probes
from pilotlight.controller.server.leader import as_leader
from pilotlight.controller.server.metrics import Metrics
from pilotlight.controller.settings import ControllerConfig, ControllerSettings
from pilotlight.core.crypto import PlatformKey
from pilotlight.core.metrics_server import MetricsAddress
from pilotlight.core.settings import SettingsInvalid
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from pilotlight.core.transport.endpoint import Endpoint, TlsCredentials
from pilotlight.core.transport.listeners import require_tls_or_loopback
from tests.fakes.authority import Authority, settings_of
from tests.fakes.plain_http import NO_TLS
from tests.fakes.ports import free_port

ROOT = Path(__file__).parents[3]
PATIENCE_S = 30.0


@dataclass
class Site:
    """One controller's home and settings; `start` returns when it serves, or at once."""

    home: Path
    tls: str
    more: str = ""
    port: int = field(default_factory=free_port)
    metrics: int = field(default_factory=free_port)
    child: subprocess.Popen[bytes] | None = None

    @property
    def config(self) -> Path:
        file = self.home / "platform.yaml"
        listen = (
            f"listen: 127.0.0.1:{self.port}, metrics_listen: 127.0.0.1:{self.metrics}{self.more}"
        )
        file.write_text(f"platform: {{home: {self.home}, {self.tls}}}\ncontroller: {{{listen}}}\n")
        return file

    def start(self, *, waits: bool = True) -> None:
        environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'functions'}:{ROOT}"}
        command = [sys.executable, "-m", "pilotlight.controller", "--config", str(self.config)]
        if not waits:
            self.child = subprocess.Popen(command, env=environ)
            return
        reading, writing = os.pipe()
        self.child = subprocess.Popen(
            [*command, "--ready-fd", str(writing)], env=environ, pass_fds=(writing,)
        )
        os.close(writing)
        assert os.read(reading, 1) == b"\n"
        os.close(reading)

    def probe(self, path: str) -> tuple[int, str]:
        token = self.home / "metrics.token"
        headers = (
            {"authorization": f"Bearer {token.read_text().strip()}"} if path == "/metrics" else {}
        )
        answer = httpx.get(
            f"http://127.0.0.1:{self.metrics}{path}",
            headers=headers,
            verify=NO_TLS,
            timeout=PATIENCE_S,
        )
        return answer.status_code, answer.text

    def wait_for(self, path: str, status: int) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                found, text = self.probe(path)
                if found == status:
                    return text
            time.sleep(0.05)
        raise AssertionError(f"{path} never said {status}")

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.child is not None
        self.child.send_signal(number)
        status = self.child.wait(PATIENCE_S)
        self.child = None
        return status


@pytest.fixture(name="authority", scope="module")
def _authority() -> Authority:
    return Authority()


@pytest.fixture(name="site", scope="module")
def _site(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("c")
    site = Site(home, settings_of(authority.issue(home / "tls", "127.0.0.1")))
    first_admin_key(site.config)
    site.start()
    yield site
    assert site.end() == 0


async def test_who_has_a_certificate_of_the_platform_follows_the_feed(
    site: Site, authority: Authority, tmp_path: Path
) -> None:
    ours = Endpoint.parse(
        f"https://127.0.0.1:{site.port}", TlsCredentials(authority.issue(tmp_path, "a-0"))
    )
    token = {HEADER_PLATFORM_TOKEN: PlatformKey.load(site.home / "platform.key").token}
    async with httpx.AsyncClient(
        transport=ours.transport(), base_url=ours.base_url, timeout=PATIENCE_S
    ) as http:
        assert (
            await http.get("/internal/feed", params={"after": 0, "wait_s": 0}, headers=token)
        ).status_code == 200
        # a certificate is no token
        assert (await http.get("/internal/feed", params={"after": 0})).status_code in (401, 403)
        assert (await http.get("/v1/apps")).status_code == 401  # nor a key


async def test_who_has_none_is_not_even_heard(
    site: Site, authority: Authority, tmp_path: Path
) -> None:
    stranger = Endpoint.parse(
        f"https://127.0.0.1:{site.port}",
        TlsCredentials(Authority("x").issue(tmp_path, "a-0", ca=authority)),
    )
    async with httpx.AsyncClient(
        transport=stranger.transport(), base_url=stranger.base_url, timeout=PATIENCE_S
    ) as http:
        with pytest.raises(
            httpx.ConnectError, match="does not trust the authority of our certificate"
        ):
            await http.get("/v1/apps")
    with socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE_S) as plain:
        plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert b"200" not in plain.recv(1000)


def test_probes_are_told_beside_the_metrics(site: Site) -> None:
    assert site.probe("/healthz") == (200, "ok\n")
    assert site.probe("/readyz") == (200, "ok\n")
    assert "pilotlight_controller_feed_followers" in site.probe("/metrics")[1]


@pytest.mark.slow  # starts a second controller
def test_a_second_controller_stands_by_until_it_is_told_to_stop(site: Site) -> None:
    second = Site(site.home, site.tls, more=", standby: true")
    second.start(waits=False)
    assert "standing by for another controller" in second.wait_for("/readyz", 503)
    assert second.probe("/healthz")[0] == 200
    assert site.probe("/readyz")[0] == 200
    assert second.end() == 0


async def test_who_stands_by_takes_over_when_the_other_is_gone(tmp_path: Path) -> None:
    first, second = (ControllerLock(tmp_path / "lock") for _ in range(2))
    first.acquire()
    waiting = as_leader(
        second, waits=True, metrics=Metrics(), address=MetricsAddress(socket_path=None)
    )
    entering = asyncio.create_task(waiting.__aenter__())
    await asyncio.sleep(0)
    assert not second.is_held()
    first.release()
    await entering
    assert second.is_held()
    await waiting.__aexit__(None, None, None)
    assert not second.is_held()


async def test_without_standing_by_the_second_gives_up(tmp_path: Path) -> None:
    with ControllerLock(tmp_path / "lock"), pytest.raises(AlreadyRunning):
        async with as_leader(
            ControllerLock(tmp_path / "lock"),
            waits=False,
            metrics=Metrics(),
            address=MetricsAddress(socket_path=None),
        ):
            pass


def test_a_lock_whose_session_ended_is_not_held(postgres_url: str, tmp_path: Path) -> None:
    engine, other = sa.create_engine(postgres_url), sa.create_engine(postgres_url)
    lock = ControllerLock(tmp_path / "lock", engine)
    with lock:
        assert lock.is_in_database
        assert lock.is_held()
        with other.connect() as sql:
            sql.execute(
                sa.text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> "
                    "pg_backend_pid() AND datname = current_database()"
                )
            )
        assert not lock.is_held()
    engine.dispose()
    other.dispose()


@pytest.mark.slow  # starts a second controller
def test_the_first_key_is_made_where_the_operator_cannot_start_the_platform(tmp_path: Path) -> None:
    config, secret = tmp_path / "platform.yaml", tmp_path / "database-url"
    secret.write_text(f"sqlite:///{tmp_path / 'elsewhere.db'}\n")
    config.write_text(
        f"platform: {{home: {tmp_path / 'home'}}}\ncontroller: {{database_url_file: {secret}}}\n"
    )
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'functions'}:{ROOT}"}
    command = [
        sys.executable,
        "-m",
        "pilotlight.controller",
        "--config",
        str(config),
        "--first-key",
    ]
    first, second = (
        subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        for _ in range(2)
    )
    assert first.stdout.startswith("pl_")
    assert (tmp_path / "elsewhere.db").exists()
    assert second.returncode == 1
    assert "there are keys" in second.stderr


def test_a_url_with_a_password_may_stand_in_a_file_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "url"
    with pytest.raises(ValueError, match=r"database_url_file = .*is the secret mounted\?"):
        ControllerSettings(database_url_file=str(file))
    file.write_text("postgresql+psycopg://u:p@h/d\n")
    assert (
        ControllerSettings(database_url_file=str(file)).database_url
        == "postgresql+psycopg://u:p@h/d"
    )
    with pytest.raises(ValueError, match="database_url is set, too"):
        ControllerSettings(database_url="sqlite:///x", database_url_file=str(file))


async def test_a_loop_that_ended_is_no_health() -> None:
    async def breaks() -> None:
        raise ZeroDivisionError

    broken, over = (
        asyncio.create_task(breaks(), name="planner"),
        asyncio.create_task(asyncio.sleep(0, None), name="cluster"),
    )
    await asyncio.wait([broken, over])
    assert await Probes(tasks=[broken, over]).answer("/healthz") == (503, "broken: planner")
    assert await Probes().answer("/metrics") is None


@pytest.mark.parametrize("listen", ["0.0.0.0:8710", "10.0.0.1:1", "[::]:1", "controller:1"])
def test_others_are_not_answered_without_knowing_who_they_are(listen: str, tmp_path: Path) -> None:
    file = tmp_path / "platform.yaml"
    file.write_text(f"controller: {{listen: '{listen}'}}\n")
    with pytest.raises(SettingsInvalid, match=r"controller\.listen = .*needs platform\.tls_cert"):
        ControllerConfig.read(file)


def test_this_machine_may_ask_in_plain() -> None:
    for listen in ("127.0.0.1:1", "[::1]:1", "localhost:1", None):
        require_tls_or_loopback("controller.listen", listen, is_known=False)
    with pytest.raises(ValueError, match="listen = 'x': must be host:port"):
        ControllerSettings(listen="x")
