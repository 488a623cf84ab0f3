"""What a worker can do to the platform, to its host and to another tenant: the attempts of
`apps/attacker.py`, made from inside one.

Two tenants run on one platform. One of them holds something of everything (`apps/holder.py`), the
other one attacks. The platform, its host's services and this test share a network namespace that
the test makes, so nothing leaves the machine, and its directories lie outside of /tmp, which a slot
hides: that they are denied is due to their modes.

An attempt that is listed as open and is denied fails the test, too: its entry in the table must
then say so."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import http.server
import os
import shutil
import socket
import sqlite3
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import yaml

import pilotlight
from pilotlight import profile
from pilotlight.client import sessions
from pilotlight.packaging.app_loader import load_app, load_module
from pilotlight.packaging.build import build
from pilotlight.packaging.deploy import deploy
from pilotlight.spec.function import WeightsSpec
from pilotlight.spec.record_json import to_json
from snapshotter.shim.sandbox import netns
from tests.e2e.frozen import SNAPSHOT_S
from tests.e2e.harness import APPS, PlatformUnderTest, platform_up, wait_for
from tests.fakes.plain_http import NO_TLS

pytestmark = [pytest.mark.root, pytest.mark.e2e, pytest.mark.timeout(SNAPSHOT_S + 180)]

FEWEST = 60
PORT = 8700
METADATA, PRIVATE = "169.254.169.254", "10.99.0.1"
"""Addresses of the test's own network namespace."""
PROCESSES = ("snapshotter", "controller", "activator")
MARKER = "left-by-the-holder"
OWN_SECRET, OTHER_SECRET = "the attacker's own secret", "a secret of another app"
ROOT = Path(__file__).parents[2]
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, kw_only=True)
class Walk:
    """The table, and what became of each attempt in it; `absent` are facts of the machine that are
    not so."""

    table: list[Any]
    outcomes: dict[str, str]
    absent: set[str]
    network: str

    def of(self, *, is_open: bool) -> dict[str, str]:
        """Outcomes of the attempts that are expected to succeed, or to be denied: all of them in a
        network of the functions' own."""
        there = [a for a in self.table if a.needs not in self.absent]
        return {
            a.name: self.outcomes[a.name]
            for a in there
            if (self.network == "host" and bool(a.open_until)) is is_open
        }


@contextlib.contextmanager
def own_network() -> Iterator[Path]:
    """Run the calling thread, and what it starts, in a network namespace of its own; yields a file
    that names the host's."""
    host = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        netns.unshare()
        for address in (METADATA, PRIVATE):
            subprocess.run(
                ["ip", "address", "add", f"{address}/32", "dev", "lo"], check=True, timeout=10
            )
        yield Path(f"/proc/{os.getpid()}/fd/{host}")
    finally:
        if ctypes.CDLL(None, use_errno=True).setns(host, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(host)


class _Service(http.server.BaseHTTPRequestHandler):
    """A server that a function should not reach."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"for the host only")

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output short."""


@contextlib.contextmanager
def services() -> Iterator[dict[str, tuple[str, int]]]:
    """Servers of the host, of a cloud and of a private network; name → address."""
    with contextlib.ExitStack() as stack:
        found = {}
        for name, host in {
            "host_service": "127.0.0.1",
            "metadata_service": METADATA,
            "private_service": PRIVATE,
        }.items():
            server = stack.enter_context(http.server.ThreadingHTTPServer((host, 0), _Service))
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            found[name] = (host, int(server.server_address[1]))
        yield found


@contextlib.contextmanager
def platform_outside_of_tmp(redis_url: str, network: str) -> Iterator[PlatformUnderTest]:
    """A platform with the ports and metrics of platform.yaml, below a directory that each user of
    the machine may enter.

    `network`: of functions.
    """
    root, programs = (
        Path(tempfile.mkdtemp(prefix="pl", dir=directory))
        for directory in ("/var/lib", "/usr/local")
    )
    for directory in (root, programs):
        directory.chmod(0o755)
    listed = yaml.safe_load((ROOT / "platform.yaml").read_text())
    metrics: dict[str, dict[str, object]] = {
        name: {"metrics_listen": listed[name]["metrics_listen"]}
        for name in ("controller", "snapshotter", "weight_cache")
    }
    metrics["snapshotter"]["function_network"] = network
    activator = {
        "listen": f"127.0.0.1:{PORT}",
        "metrics_listen": listed["activator"]["metrics_listen"],
        "redis_url": redis_url,
    }
    try:
        with platform_up(
            platform={"home": str(root / "h"), "run": str(root / "r")},
            activator=activator,
            **metrics,
        ) as platform:
            profile.save(platform.profile, path=root / "profile.toml")
            (root / "readable").write_text("a file that anybody may read")
            (root / "writable").mkdir()
            (root / "writable").chmod(0o1777)
            shutil.copy(shutil.which("id") or "/usr/bin/id", programs / "id")
            (programs / "id").chmod(0o4755)
            (root / "programs").symlink_to(programs)
            yield platform
    finally:
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(programs, ignore_errors=True)


class Tenant:
    """A tenant of the platform, with an app whose source lies in `folder`."""

    def __init__(
        self,
        operator: PlatformUnderTest,
        name: str,
        folder: Path,
        *,
        secrets: dict[str, dict[str, str]],
    ) -> None:
        answer = httpx.post(
            f"{operator.url}/v1/tenants",
            json={"name": name},
            headers=operator.headers,
            timeout=60,
            verify=NO_TLS,
        )
        assert answer.status_code == 201, answer.text
        self.name, self.key = name, answer.json()["key"]
        mine = replace(operator.profile, api_key=str(self.key["secret"]))
        self.platform = replace(
            operator, profile=mine, profile_file=profile.save(mine, path=folder / "profile.toml")
        )
        wait_for(
            lambda: self.platform.post("none/none").status_code == 404,
            "the tenant's key to be known",
        )
        with self.platform.client() as client:
            for secret, values in secrets.items():
                client.put_secret(secret, values)

    def deploy(self, file: str, folder: Path, weights: str, text: str) -> ModuleType:
        """Deploy an app of tests/e2e/apps by itself, with a file of weights beside it; its
        module."""
        source = folder / file
        shutil.copy(APPS / file, source)
        (folder / weights).mkdir()
        (folder / weights / "model.txt").write_text(text)
        with self.platform.client() as client:
            deploy(load_app(str(source)), client=client)
        return load_module(str(source))

    def instance(self, app: str) -> dict[str, Any]:
        """Its one instance."""
        with self.platform.client() as client:
            (found,) = client.instances(app=app)
        return found


@pytest.fixture(scope="module", params=["own", "host"])
def walk(
    request: pytest.FixtureRequest, redis_server: str, tmp_path_factory: pytest.TempPathFactory
) -> Walk:
    """All attempts, made by one call of one tenant's function."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("rich", "attacking")}
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("OPERATOR_PASSWORD", "for the operator only")
        network = stack.enter_context(own_network())
        servers = stack.enter_context(services())
        operator = stack.enter_context(platform_outside_of_tmp(redis_server, request.param))
        rich = Tenant(
            operator, "rich", folders["rich"], secrets={"kept": {"KEPT_SECRET": "the holder's"}}
        )
        secrets = {"own": {"OWN_SECRET": OWN_SECRET}, "other": {"OTHER_SECRET": OTHER_SECRET}}
        poor = Tenant(operator, "poor", folders["attacking"], secrets=secrets)
        rich.deploy("holder.py", folders["rich"], "private", "the bytes of one tenant's model")
        table = poor.deploy(
            "attacker.py", folders["attacking"], "own", "the attacker's own model"
        ).TABLE
        facts = {
            **servers,
            **gather(operator, rich, poor, folders, network=network, redis=redis_server),
        }
        wanted = [a for a in table if not a.needs or facts[a.needs]]
        outcomes = poor.platform.result(
            "attacker/walk", {"names": [a.name for a in wanted], "facts": facts}
        )
        assert rich.instance("holder")["id"] == facts["instance"], "the holder's instance is gone"
        with rich.platform.client() as client:
            assert client.call(facts["sandbox"]).state == "RUNNING", "the holder's sandbox is gone"
        return Walk(
            table=table,
            outcomes=outcomes,
            absent={a.needs for a in table if a.needs and not facts[a.needs]},
            network=request.param,
        )


def gather(
    operator: PlatformUnderTest,
    rich: Tenant,
    poor: Tenant,
    folders: dict[str, Path],
    *,
    network: Path,
    redis: str,
) -> dict[str, Any]:
    """Names, numbers, digests and paths that the attacker is told: it need not guess. Each path
    exists."""
    key = 0x70696C6F
    opened = rich.platform.result("holder/hold", {"marker": MARKER, "ipc_key": key})
    call = rich.platform.post(
        "holder/hold", {"marker": MARKER, "ipc_key": key}, verb="submit"
    ).json()["id"]
    wait_for(lambda: rich.platform.usage("call = ?", call), "the record of the call")
    poor.platform.result("attacker/walk", {"names": [], "facts": {}})
    sandbox = _sandbox(rich)
    instance, own = rich.instance("holder"), poor.instance("attacker")
    with rich.platform.client() as client:
        manifest = client.get_weights("private").manifest
    with (
        build(load_app(str(folders["rich"] / "holder.py"))) as theirs,
        build(load_app(str(folders["attacking"] / "attacker.py"))) as ours,
    ):
        (held,), (mine,) = theirs.functions, ours.functions
    mine = replace(mine, weights=(), secrets=())
    home, run = operator.local.paths.home, operator.local.paths.run
    slot = Path(instance["socket"]).parent
    root = home.parent
    weights = _file_with(home / "weights/files", b"the bytes of one tenant's model")
    paths = {
        "home": home,
        "key": home / "platform.key",
        "database": home / "controller/controller.db",
        "database_log": home / "controller/controller.db-wal",
        "journal": next((home / "activator").rglob("journal-*.ndjson")),
        "routes": next((home / "activator").rglob("routes.ndjson")),
        "process_log": home / "logs/controller.log",
        "profile": root / "profile.toml",
        "code": home / "node/code" / held.bundle / "holder.py",
        "bundle": next(home.rglob(f"blobs/*/{held.bundle}")),
        "image": _register_image(home, rich.name),
        "weights": weights,
        "manifest": next(path for path in (home / "weights").rglob(f"{manifest}*")),
        "instance_log": next(
            path for path in (home / "node").rglob(f"*{instance['id']}*") if path.is_file()
        ),
        "snapshots": home / "node/snapshots",
        "run": run,
        "slot": slot,
        "launch": slot / "launch.json",
        "shadow": Path("/etc/shadow"),
        "passwd": Path("/etc/passwd"),
        "program": Path("/usr/bin/env"),
        "readable": root / "readable",
        "writable": root / "writable",
        "set_user_id": (root / "programs").resolve() / "id",
        "worker_socket": Path(instance["socket"]),
        "shim_socket": slot / "shim.sock",
        "redis": Path(redis.removeprefix("unix://").partition("?")[0]),
        "network": network,
        **_groups(int(instance["pid"]), int(own["pid"])),
    }
    missing = [str(path) for path in paths.values() if not os.path.lexists(path)]
    assert not missing, missing
    return {
        "paths": {name: str(path) for name, path in paths.items()},
        "pids": {
            "another tenant's worker": instance["pid"],
            **{name: operator.pid(name) for name in PROCESSES},
        },
        "marker": MARKER,
        "abstract": MARKER,
        "ipc_key": key,
        "other_port": opened["port"],
        "other_tenant": rich.name,
        "other_key": rich.key["id"],
        "port": PORT,
        "platforms_network": os.stat("/proc/thread-self/ns/net").st_ino,
        "api_key": poor.key["secret"],
        "own_secret": OWN_SECRET,
        "call": call,
        **sandbox,
        "instance": instance["id"],
        "revision": instance["revision"],
        "bundle": held.bundle,
        "manifest": manifest,
        "weights_file": weights.name,
        "with_bundle": to_json(replace(mine, bundle=held.bundle)),
        "with_weights": to_json(
            replace(mine, weights=(WeightsSpec(name="stolen", manifest=manifest),))
        ),
        "with_image": to_json(replace(mine, image=paths["image"].name)),
        "with_secret": to_json(replace(mine, secrets=("kept",))),
        "snapshot": _snapshot(operator),
        "groups": "memory_use" in paths,
        "core_in_directory": not Path("/proc/sys/kernel/core_pattern").read_text().startswith("|"),
        "kernel_log_restricted": Path("/proc/sys/kernel/dmesg_restrict").read_text().strip() != "0",
        "vsock": _makes_sockets(socket.AF_VSOCK),
    }


def _sandbox(tenant: Tenant) -> dict[str, str]:
    """A sandbox of the tenant, and a dict and a queue of one name."""
    with sessions.use_profile(tenant.platform.profile):
        app = pilotlight.App.lookup("box", create_if_missing=True)
        sandbox = pilotlight.Sandbox.create(app=app, timeout=3600)
        assert sandbox.exec("true").wait() == 0
        pilotlight.Dict.from_name("kept-values", create_if_missing=True)["key"] = MARKER
        pilotlight.Queue.from_name("kept-values", create_if_missing=True).put(MARKER)
    with tenant.platform.client() as client:
        function = client.call(sandbox.object_id).function
    return {
        "sandbox": sandbox.object_id,
        "sandbox_function": function,
        "collection": "kept-values",
    }


def _snapshot(operator: PlatformUnderTest) -> str | None:
    """A file of a snapshot; None where this machine makes none."""
    node = httpx.get(
        f"{operator.url}/v1/node", headers=operator.headers, timeout=60, verify=NO_TLS
    ).json()
    if not any(feature["name"] == "RESTORE" and feature["on"] for feature in node["features"]):
        return None
    directory = operator.local.paths.home / "node/snapshots"
    return str(
        wait_for(
            lambda: next(directory.glob("sn-*/images/pages-*"), None),
            "a snapshot",
            timeout_s=SNAPSHOT_S,
        )
    )


def _register_image(home: Path, tenant: str) -> Path:
    """An environment as if the tenant had built it: a build would fetch packages, and nothing
    leaves this network."""
    digest = hashlib.sha256(tenant.encode()).hexdigest()
    with (
        contextlib.closing(
            sqlite3.connect(home / "controller/controller.db", timeout=10)
        ) as database,
        database,
    ):
        ((owner,),) = database.execute("SELECT id FROM tenants WHERE name = ?", (tenant,))
        database.execute(
            "INSERT INTO images (tenant, digest, spec, created_at) VALUES (?, ?, '{}', 0)",
            (owner, digest),
        )
    directory = home / "node/images" / digest
    directory.mkdir(parents=True)
    directory.chmod(0o755)
    return directory


def _file_with(folder: Path, content: bytes) -> Path:
    return next(
        path for path in folder.rglob("*") if path.is_file() and path.read_bytes() == content
    )


def _groups(other: int, own: int) -> dict[str, Path]:
    """The control groups' files of two processes; none where the platform makes no groups."""
    version_2 = not Path("/sys/fs/cgroup/memory").exists()
    directories = [_group(pid, "" if version_2 else "memory") for pid in (other, own)]
    if not all(directory.parent.name.startswith("pilotlight-") for directory in directories):
        return {}
    use, limit = (
        ("memory.current", "memory.max")
        if version_2
        else ("memory.usage_in_bytes", "memory.limit_in_bytes")
    )
    others, mine = directories
    return {
        "memory_use": others / use,
        "own_memory_limit": mine / limit,
        "cgroup_procs": others / "cgroup.procs",
    }


def _group(pid: int, controller: str) -> Path:
    """A process's directory in one hierarchy; controller "" is version 2."""
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    path = next((path for _, controllers, path in lines if controllers == controller), "/")
    return Path("/sys/fs/cgroup") / controller / path.lstrip("/")


def _makes_sockets(family: int) -> bool:
    try:
        socket.socket(family).close()
    except OSError:
        return False
    return True


def test_the_table_names_at_least_60_different_attempts(walk: Walk) -> None:
    assert len({attempt.name for attempt in walk.table}) == len(walk.table)
    assert len(walk.outcomes) >= FEWEST


def test_every_attempt_was_made_and_proves_something(walk: Walk) -> None:
    assert {
        name: said
        for name, said in walk.outcomes.items()
        if not said.startswith(("denied: ", "succeeded: "))
    } == {}


def test_what_must_be_denied_is_denied(walk: Walk) -> None:
    assert {
        name: said
        for name, said in walk.of(is_open=False).items()
        if said.startswith("succeeded: ")
    } == {}


def test_what_is_listed_as_open_is_still_open(walk: Walk) -> None:
    """One that is denied now loses its `open_until` in the table."""
    assert {
        name: said for name, said in walk.of(is_open=True).items() if said.startswith("denied: ")
    } == {}
