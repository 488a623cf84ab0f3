"""The real process: killed in the middle of deploys, out of disk, started twice."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store
from pilotlight.controller.registry import launch_spec
from pilotlight.controller.server.bootstrap import first_admin_key
from pilotlight.core.crypto import PlatformKey
from pilotlight.core.settings import Paths, PlatformSettings
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from pilotlight.protocol import FunctionRoute
from tests.fakes.plain_http import NO_TLS
from tests.functions.controller.parts import BUNDLE, BUNDLE_DIGEST, spec

ROOT = Path(__file__).parents[3]
START_S = 30.0


class Process:
    """One controller process over `home`, started again at will. Owner: one test."""

    def __init__(self, home: Path, extra: str = "") -> None:
        self.home = home
        self.config = home / "platform.yaml"
        self.config.write_text(
            f"platform: {{home: {home}}}\ncontroller: {{metrics_listen: null{extra}}}\n"
        )
        key = first_admin_key(self.config)
        assert key is not None
        self.key = key
        self._child: subprocess.Popen[bytes] | None = None
        transport = httpx.HTTPTransport(uds=str(home / "run" / "controller.sock"), verify=NO_TLS)
        headers = {"authorization": f"Bearer {self.key}"}
        self.http = httpx.Client(
            transport=transport, base_url="http://controller", headers=headers, timeout=START_S
        )

    def start(self) -> None:
        """Returns when it serves."""
        reading, writing = os.pipe()
        self._child = self.spawn("--ready-fd", str(writing), pass_fds=(writing,))
        os.close(writing)
        ready = os.read(reading, 1)
        os.close(reading)
        assert ready == b"\n"

    def spawn(self, *arguments: str, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
        """A controller process."""
        environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'functions'}:{ROOT}"}
        command = [
            sys.executable,
            "-m",
            "pilotlight.controller",
            "--config",
            str(self.config),
            *arguments,
        ]
        return subprocess.Popen(command, env=environ, pass_fds=pass_fds, stderr=subprocess.PIPE)

    def end(self, number: signal.Signals) -> int:
        """Send a signal; returns the exit status."""
        assert self._child is not None
        self._child.send_signal(number)
        status = self._child.wait(START_S)
        assert self._child.stderr is not None
        self._child.stderr.close()
        self._child = None
        return status

    @property
    def pid(self) -> int:
        """Of the process that was started."""
        assert self._child is not None
        return self._child.pid

    def feed(self) -> dict[str, object]:
        """Everything in the feed, by key; removed things left out."""
        headers = {HEADER_PLATFORM_TOKEN: PlatformKey.load(self.home / "platform.key").token}
        body = self.http.get(
            "/internal/feed", params={"after": 0, "limit": 5000}, headers=headers
        ).json()
        return {
            change["key"]: change["value"]
            for change in body["changes"]
            if change["kind"] == "function" and change["value"]
        }

    def close(self) -> None:
        """Leave nothing running."""
        if self._child is not None:
            self.end(signal.SIGKILL)
        self.http.close()


@pytest.fixture
def process(short_tmp: Path) -> Iterator[Process]:
    started = Process(short_tmp)
    yield started
    started.close()


@pytest.mark.slow  # starts a controller
def test_it_serves_stops_in_order_and_serves_again(process: Process) -> None:
    process.start()
    path = process.home / "run" / "controller.sock"
    paths = Paths.of(PlatformSettings(home=str(process.home)), {})
    reader = os.getegid() if paths.activator_uid is None else paths.activator_uid
    assert (path.stat().st_mode & 0o777, path.stat().st_gid) == (
        0o600 if paths.activator_uid is None else 0o660,
        reader,
    )
    assert process.http.get("/v1/whoami").status_code == 200
    scrape = httpx.Client(
        transport=httpx.HTTPTransport(
            uds=str(process.home / "run" / "metrics-controller.sock"), verify=NO_TLS
        )
    )
    assert (
        'requests_total{route="/v1/whoami",status="200"} 1.0' in scrape.get("http://metrics/").text
    )
    assert process.end(signal.SIGTERM) == 0
    with (
        socket.socket(socket.AF_UNIX) as caller,
        pytest.raises((FileNotFoundError, ConnectionRefusedError)),
    ):
        caller.connect(str(path))
    assert not path.exists() or paths.controller_uid is not None, (
        "without root it leaves the name, in a directory of root's"
    )
    process.http.close()
    assert first_admin_key(process.config) is None, "a second start makes no second key"


@pytest.mark.timeout(180)  # three starts of the controller
def test_a_plan_that_changed_in_the_file_reaches_activators_and_one_that_is_gone_is_said(
    process: Process,
) -> None:
    with process.config.open("a") as f:
        f.write("plans: {gold: {concurrent: 5}}\n")
    process.start()
    assert process.http.patch("/v1/tenants/default", json={"plan": "gold"}).status_code == 200
    assert process.end(signal.SIGTERM) == 0
    text = process.config.read_text()
    process.config.write_text(text.replace("concurrent: 5", "concurrent: 9"))
    process.start()
    headers = {HEADER_PLATFORM_TOKEN: PlatformKey.load(process.home / "platform.key").token}
    changes = process.http.get("/internal/feed", params={"after": 0}, headers=headers).json()[
        "changes"
    ]
    assert [c["value"]["plan"]["concurrent"] for c in changes if c["kind"] == "tenant"] == [9]
    assert process.end(signal.SIGTERM) == 0
    process.config.write_text(text.partition("plans:")[0])
    without = process.spawn()
    _, said = without.communicate(timeout=START_S)
    assert (without.returncode, b"plans: tenant 'default': plan 'gold' does not exist" in said) == (
        1,
        True,
    ), said


@pytest.mark.slow  # starts a controller
def test_a_second_controller_is_refused_and_the_first_goes_on(process: Process) -> None:
    process.start()
    second = process.spawn()
    _, said = second.communicate(timeout=START_S)
    assert second.returncode == 1
    assert b"another controller (pid " in said
    assert process.http.get("/healthz").json() == {"status": "ok"}


@pytest.mark.e2e
# httpcore leaves a socket open whose connect was refused
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.timeout(240)  # five starts of a process, on a machine that may be busy
def test_killed_in_the_middle_of_deploys_it_comes_back_whole(process: Process) -> None:
    acknowledged: dict[str, str] = {}
    for life in range(4):
        process.start()
        if life == 0:
            assert process.http.put(f"/v1/blobs/{BUNDLE_DIGEST}", content=BUNDLE).status_code == 200
        # From the fourth deploy on the end may come at any moment: at each life at another one.
        killer = threading.Timer(0.003 * life, process.end, (signal.SIGKILL,))
        _deploy_until_cut_off(process, life, acknowledged, on_fourth=killer.start)
        killer.join()
    process.start()
    _expect_consistent(process, acknowledged)
    assert len(acknowledged) == 4 * 3 * 2, (
        "each life deployed its three apps of two functions before it was cut off"
    )


def _deploy_until_cut_off(
    process: Process, life: int, acknowledged: dict[str, str], *, on_fourth: Callable[[], None]
) -> None:
    try:
        for n in range(10_000):
            if n == 3:
                on_fourth()
            functions = [
                spec(name, env={"LIFE": str(life), "N": str(n)}) for name in ("one", "two")
            ]
            answer = process.http.post(
                f"/v1/apps/app{life}-{n % 3}/deploy", json={"functions": functions}
            )
            assert answer.status_code == 200, answer.text
            body = answer.json()
            acknowledged.update(
                {f"{body['app']}/{f['function']}": f["revision"] for f in body["functions"]}
            )
    except httpx.TransportError:
        pass  # the moment this test is about


def _expect_consistent(process: Process, acknowledged: dict[str, str]) -> None:
    tenant = process.http.get("/v1/whoami").json()["tenant"]["id"]
    feed = process.feed()
    store = Store(f"sqlite:///{process.home / 'controller/controller.db'}", clock=time.time)
    with store.read() as sql:
        assert sql.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
        assert sql.exec_driver_sql("PRAGMA foreign_key_check").all() == []
        functions, traffic = tables.functions, tables.traffic
        joined = sa.select(functions.c.app, functions.c.name, traffic.c.revision).join(
            traffic, traffic.c.function == functions.c.id
        )
        rows = {f"{row.app}/{row.name}": row.revision for row in sql.execute(joined)}
        versions = dict(sql.execute(sa.select(tables.apps.c.name, tables.apps.c.version)).all())
        history = dict(
            sql.execute(
                sa.select(
                    tables.deployments.c.app, sa.func.max(tables.deployments.c.version)
                ).group_by("app")
            ).all()
        )
    store.close()
    routed = {}
    for key, value in feed.items():
        route = FunctionRoute.from_json(value)  # type: ignore[arg-type]
        assert route.id == launch_spec.function_id(
            tenant=tenant, environment="main", app=route.app, function=route.function
        )
        assert key == f"{tenant}/main/{route.app}/{route.function}"
        routed[f"{route.app}/{route.function}"] = route.traffic[0][0]
    assert routed == rows, "the feed tells what the tables hold"
    assert versions == history
    ordinals = {name: int(revision.partition("-")[0][1:]) for name, revision in rows.items()}
    lost = [
        name
        for name, revision in acknowledged.items()
        if ordinals[name] < int(revision.partition("-")[0][1:])
    ]
    assert lost == [], "what was acknowledged is there"
    assert {rows[f"{app}/one"].partition("-")[0] for app in versions} == {
        rows[f"{app}/two"].partition("-")[0] for app in versions
    }


@pytest.fixture
def small_disk(short_tmp: Path) -> Iterator[Path]:
    """8 MiB of file system."""
    directory = short_tmp / "d"
    directory.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "tmpfs", directory], check=True
    )
    yield directory
    subprocess.run(["umount", "-l", directory], check=True)


@pytest.mark.root
@pytest.mark.slow  # starts a controller
def test_a_full_disk_refuses_the_upload_keeps_nothing_and_serves_on(small_disk: Path) -> None:
    process = Process(small_disk)
    try:
        process.start()
        large = os.urandom(16 * 1024 * 1024)
        for _ in range(2):
            answer = process.http.put(
                f"/v1/blobs/{hashlib.sha256(large).hexdigest()}", content=large
            )
            assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (
                507,
                "storage-full",
            )
            assert list((small_disk / "blobs" / "incoming").iterdir()) == []
        assert process.http.put(f"/v1/blobs/{BUNDLE_DIGEST}", content=BUNDLE).status_code == 200
        assert (
            process.http.post("/v1/apps/a/deploy", json={"functions": [spec()]}).status_code == 200
        )
    finally:
        process.close()


def _fill(file: Path) -> None:
    with file.open("wb", buffering=0) as f, contextlib.suppress(OSError):  # it ends with ENOSPC
        while True:
            f.write(b"\0" * 4096)


@pytest.mark.root
@pytest.mark.slow  # starts a controller
def test_a_deploy_on_a_full_disk_is_refused_and_changes_nothing(small_disk: Path) -> None:
    process = Process(small_disk)
    try:
        process.start()
        assert process.http.put(f"/v1/blobs/{BUNDLE_DIGEST}", content=BUNDLE).status_code == 200
        assert (
            process.http.post("/v1/apps/a/deploy", json={"functions": [spec()]}).status_code == 200
        )
        before = json.dumps(process.feed(), sort_keys=True)
        filler = small_disk / "filler"
        _fill(filler)
        answer = process.http.post(
            "/v1/apps/a/deploy", json={"functions": [spec(description="x" * 200_000)]}
        )
        assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (
            507,
            "storage-full",
        )
        assert json.dumps(process.feed(), sort_keys=True) == before
        filler.unlink()
        assert (
            process.http.post(
                "/v1/apps/a/deploy", json={"functions": [spec(description="x" * 200_000)]}
            ).status_code
            == 200
        )
    finally:
        process.close()


@pytest.mark.slow  # starts three controllers
def test_a_tenants_deletion_goes_on_after_kills(process: Process) -> None:
    process.start()
    made = process.http.post("/v1/tenants", json={"name": "acme"})
    assert made.status_code == 201, made.text
    store = Store(f"sqlite:///{process.home / 'controller' / 'controller.db'}", clock=time.time)
    columns: dict[str, object] = {column.name: "" for column in tables.traces.columns}
    columns |= {"status": 200, "duration_ms": 1.0, "at": time.time(), "document": "x" * 2000}
    with contextlib.closing(store):
        with store.write() as write:
            for tenant, count in ((made.json()["id"], 60_000), ("t-other", 10)):
                rows = [{**columns, "tenant": tenant, "id": f"{n}"} for n in range(count)]
                write.sql.execute(sa.insert(tables.traces), rows)
        assert process.http.delete("/v1/tenants/acme").status_code == 202
        for _ in range(2):
            time.sleep(0.1)
            process.end(signal.SIGKILL)
            process.start()
        until = time.monotonic() + START_S
        while (deletion := process.http.get("/v1/tenants/acme").json()["deletion"])["state"] != (
            "instances"  # there is no node agent
        ):
            assert time.monotonic() < until, deletion
            time.sleep(0.05)
        assert deletion["counts"]["traces"] == 60_000
        with store.read() as sql:
            left = sql.execute(sa.select(tables.traces.c.tenant)).scalars().all()
        assert left == ["t-other"] * 10
