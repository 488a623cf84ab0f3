"""Sandboxes on a real platform: what their code reaches, who reaches them, and that nothing of them
outlives their end."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import pilotlight
from activator.autoscaler.suspended_tenants import GRACE_S
from pilotlight.client import sessions
from pilotlight.errors import ClientClosedRequest, DeadlineExceeded, NotFound, WorkerCrashed
from pilotlight.profile import Profile
from pilotlight.spec.sandboxes import SLACK_S
from tests.e2e.harness import PlatformUnderTest, wait_for
from tests.fakes.plain_http import NO_TLS

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(240)]
APP = "stranger"
REACHED = """
import json, os, socket, sys

def reaches(family, address):
    with socket.socket(family) as s:
        s.settimeout(2)
        try:
            s.connect(address)
        except OSError as e:
            return type(e).__name__
    return True

def asks(path):
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(5)
        s.connect(path)
        s.sendall(b"POST /v1/dicts/seen HTTP/1.1\\r\\nhost: x\\r\\ncontent-length: 2\\r\\n\\r\\n{}")
        return int(s.recv(64).split()[1])

slot = "/run/pilotlight/slot"
calls = [f"{slot}/calls/{name}.sock" for name in sys.argv[2:]]
print(json.dumps({
    "uid": os.getuid(),
    "keys": [name for name in os.environ if "KEY" in name or name.startswith("PILOTLIGHT")],
    "activator": reaches(socket.AF_INET, ("127.0.0.1", int(sys.argv[1]))),
    "names": sorted(os.listdir("/sys/class/net")) if os.path.isdir("/sys/class/net") else [],
    "routes": open("/proc/net/route").read().count("\\n") - 1,
    "internet": reaches(socket.AF_INET, ("1.1.1.1", 53)),
    "calls": [asks(path) for path in calls if os.path.exists(path)],
}))
"""


@pytest.fixture(name="app")
def _app(platform: PlatformUnderTest) -> Iterator[pilotlight.App]:
    with sessions.use_profile(platform.profile):
        yield pilotlight.App.lookup(APP, create_if_missing=True)


def test_commands_files_and_lifetimes(app: pilotlight.App, platform: PlatformUnderTest) -> None:
    """A caller works in a sandbox, and it ends in each of the ways."""
    sandbox = pilotlight.Sandbox.create(
        app=app, timeout=120, workdir="/tmp/job", env={"A": "1"}, memory=256
    )
    assert sandbox.exec("python", "-c", "print(6 * 7)").stdout.read() == "42\n"
    failed = sandbox.exec("sh", "-c", "pwd; echo $A$B >&2; exit 3", env={"B": "2"})
    assert (failed.wait(), failed.stdout.read(), failed.stderr.read()) == (3, "/tmp/job\n", "12\n")
    _files(sandbox)
    cat = sandbox.exec("cat")
    cat.stdin.write("one\ntwo")
    cat.stdin.write_eof()
    cat.stdin.drain()
    assert list(cat.stdout) == ["one\n", "two"]
    assert sandbox.exec("sleep", "60", timeout=0.2).wait() == 124
    large = sandbox.exec("head", "-c", "5000000", "/dev/zero", text=False)
    assert len(large.stdout.read()) == 5_000_000
    behind = sandbox.exec("sh", "-c", "sleep 60 & echo begun")
    assert (behind.stdout.read(), behind.wait()) == ("begun\n", 0)
    # a handle in another process
    assert [s.id for s in pilotlight.Sandbox.list(app=app)] == [sandbox.id]
    other = pilotlight.Sandbox.from_id(sandbox.object_id)
    assert other.exec("cat", "/tmp/job/b.txt").stdout.read() == "a\nb\n"

    listed = json.loads(platform.cli("sandbox", "list", "--json").stdout)
    assert [row["id"] for row in listed] == [sandbox.id]
    said = platform.cli("sandbox", "exec", sandbox.id, "--", "cat", "b.txt")
    assert said.stdout == "a\nb\n"
    platform.cli("sandbox", "terminate", sandbox.id, "--yes")
    other.terminate()  # has no effect on one that has ended
    with pytest.raises(ClientClosedRequest):
        sandbox.wait()
    assert sandbox.poll() == 137
    with pytest.raises(NotFound, match="has ended"):
        sandbox.exec("true")
    wait_for(lambda: not list(pilotlight.Sandbox.list(app=app)), "an empty list")

    main = pilotlight.Sandbox.create("sh", "-c", "echo done; exit 4", app=app, memory=256)
    assert (main.wait(), main.stdout.read()) == (4, "done\n")
    late = pilotlight.Sandbox.create("sleep", "60", app=app, memory=256, timeout=0.5)
    with pytest.raises(DeadlineExceeded):
        late.wait()
    idle = pilotlight.Sandbox.create(app=app, memory=256, idle_timeout=0.3)
    assert idle.wait() == 0
    (billed,) = _records(platform, sandbox.id)
    assert billed["exec_ms"] > 300


def _files(sandbox: pilotlight.Sandbox) -> None:
    with sandbox.open("b.txt", "w") as f:
        f.write("a\nb\n")
    with sandbox.open("b.txt", "r+") as f:
        assert (f.readline(), f.read()) == ("a\n", "b\n")
        assert f.seek(-2, 2) == 2
        assert f.read() == "b\n"
    sandbox.mkdir("deep/er", parents=True)
    assert sandbox.ls() == ("b.txt", "deep")
    sandbox.rm("deep", recursive=True)
    with pytest.raises(FileNotFoundError):
        sandbox.ls("deep")
    with pytest.raises(OSError, match="Read-only"):
        sandbox.open("/etc/passwd", "w")
    with pytest.raises(FileExistsError):
        sandbox.open("b.txt", "x")


def test_who_reaches_a_sandbox_and_what_its_code_reaches(
    app: pilotlight.App, platform: PlatformUnderTest
) -> None:
    one = pilotlight.Sandbox.create(app=app, block_network=True, cpu=0.5)
    two = pilotlight.Sandbox.create(app=app, block_network=True, cpu=0.5)
    connected = pilotlight.Sandbox.create(app=app)
    seen = _probe(one, platform)
    assert seen["uid"] >= 20000
    assert seen["keys"] == _probe(connected, platform)["keys"] == []
    assert seen["activator"] is not True
    assert seen["internet"] is not True
    assert set(seen["names"]) <= {"lo"}
    assert seen["routes"] <= 0
    assert seen["calls"] == []
    assert _probe(connected, platform)["calls"] == [403]
    connected.terminate()
    # sandboxes with equal options share nothing
    assert "probe.py" not in two.ls("/tmp")
    one.exec("sleep", "7777")
    assert "7777" not in two.exec("ps", "ax").stdout.read()

    stranger = json.loads(
        platform.cli("tenant", "create", "sandbox-stranger", "--plan", "free", "--json").stdout
    )
    with platform.client() as client:
        bound = client.create_key(scope="invoke", app="elsewhere")
    for key, status in ((stranger["key"]["secret"], 404), (bound["secret"], 403), ("", 401)):
        assert _execute(platform, one.id, key) == status
    assert _execute(platform, one.id, platform.profile.api_key) == 200

    # code that stops the sandbox's own worker gains nothing by it
    (stuck,) = [
        line.split()[0]
        for line in two.exec("ps", "axo", "pid=,args=").stdout
        if "worker/boot.py" in line
    ]
    two.exec("sh", "-c", f"sleep 8888 & (sleep 0.3; kill -STOP {stuck}) &")
    time.sleep(0.5)
    for sandbox in (one, two):
        sandbox.terminate()
    wait_for(
        lambda: not _runs("sleep 7777") and not _runs("sleep 8888"), "an end of all", timeout_s=15
    )


def test_one_that_stops_its_worker_ends_at_its_timeout(
    platform: PlatformUnderTest, app: pilotlight.App
) -> None:
    lived_s = 6
    sandbox = pilotlight.Sandbox.create(app=app, timeout=lived_s)
    sandbox.exec("sleep", "5555")
    began = time.monotonic()
    (stuck,) = [
        line.split()[0]
        for line in sandbox.exec("ps", "axo", "pid=,args=").stdout
        if "worker/boot.py" in line
    ]
    sandbox.exec("sh", "-c", f"(sleep 0.2; kill -STOP {stuck}) &")
    wait_for(lambda: not _runs("sleep 5555"), "the end of the sandbox", timeout_s=lived_s + 20)
    assert time.monotonic() - began < lived_s + SLACK_S + 8  # on a busy machine
    assert sandbox.poll() is not None


@pytest.mark.soak  # the grace
def test_a_free_tenants_sandbox_is_paced_and_ends_when_its_tenant_is_suspended(
    platform: PlatformUnderTest,
) -> None:
    made = platform.cli("tenant", "create", "sandbox-debtor", "--plan", "free", "--json").stdout
    profile = dataclasses.replace(platform.profile, api_key=json.loads(made)["key"]["secret"])
    with sessions.use_profile(profile):
        app = pilotlight.App.lookup("debtor", create_if_missing=True)
        sandbox = pilotlight.Sandbox.create(app=app, timeout=300)
        sandbox.exec("sleep", "4444")
        began = time.monotonic()
        with sandbox.open("data", "wb") as f:
            for _ in range(30):  # the burst and 10 MiB more, which the SDK waits for
                f.write(bytes(1024**2))
        assert time.monotonic() - began > 2.5  # 30 MiB are 510 operations: 200, and 50 in a second
        assert sandbox.exec("stat", "-c", "%s", "data").stdout.read() == f"{30 * 1024**2}\n"
        platform.cli("tenant", "suspend", "sandbox-debtor", "--yes")
        wait_for(lambda: not _runs("sleep 4444"), "its end", timeout_s=GRACE_S + 30)
        platform.cli("tenant", "resume", "sandbox-debtor")
        with pytest.raises(WorkerCrashed, match="suspended"):
            sandbox.wait()


@pytest.mark.soak
def test_killed_processes_leave_no_sandbox_and_no_second_bill(
    mortal_platform: PlatformUnderTest,
) -> None:
    platform = mortal_platform
    with sessions.use_profile(platform.profile):
        app = pilotlight.App.lookup(APP, create_if_missing=True)
        sandbox = pilotlight.Sandbox.create(app=app)
        sandbox.exec("sleep", "6666")
        for process in ("controller", "snapshotter"):
            platform.wait_restarted(process, platform.kill(process))
            assert sandbox.exec("echo", process).stdout.read() == f"{process}\n"
        platform.wait_restarted("activator", platform.kill("activator"))
        with pytest.raises(WorkerCrashed, match="restarted"):
            sandbox.wait()
        wait_for(lambda: not _runs("sleep 6666"), "an end of all", timeout_s=15)
        with pytest.raises(NotFound):
            sandbox.exec("true")
        records = _records(platform, sandbox.id)
        time.sleep(2)  # a second one would come within this
        assert _records(platform, sandbox.id) == records
        assert len(records) == 1
        again = pilotlight.Sandbox.create(app=app)
        assert again.exec("echo", "again").stdout.read() == "again\n"
        again.terminate()


def _probe(sandbox: pilotlight.Sandbox, platform: PlatformUnderTest) -> dict[str, Any]:
    with sandbox.open("/tmp/probe.py", "w") as f:
        f.write(REACHED)
    with platform.client() as client:
        instances = [str(one["id"]) for one in client.instances(app=APP)]
    port = platform.url.rpartition(":")[2]
    probe = sandbox.exec("python", "/tmp/probe.py", port, *instances)
    assert probe.wait() == 0, probe.stderr.read()
    found: dict[str, Any] = json.loads(probe.stdout.read())
    return found


def _records(platform: PlatformUnderTest, call: str) -> list[dict[str, Any]]:
    wait_for(lambda: bool(platform.usage("call = ?", call)), "a record", timeout_s=30)
    return platform.usage("call = ?", call)


def _execute(platform: PlatformUnderTest, sandbox: str, key: str) -> int:
    profile = Profile(url=platform.url, api_key=key)
    headers = {"authorization": f"Bearer {profile.api_key}"} if key else {}
    return httpx.post(
        f"{profile.url}/v1/sandboxes/{sandbox}/exec",
        json={"args": ["true"]},
        headers=headers,
        timeout=60,
        verify=NO_TLS,
    ).status_code


def _runs(command: str) -> bool:
    return (
        command
        in subprocess.run(["ps", "axo", "args="], capture_output=True, text=True, check=True).stdout
    )
