"""The process that holds the database and the keys has no root: what goes on as before, and what
code that takes it over reaches."""

from __future__ import annotations

import json
import os
import socket
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from pilotlight.cli.supervisor import local_platform, stale_processes
from tests.e2e.harness import STOP_S, PlatformUnderTest, platform_up, wait_for
from tests.e2e.test_activator_user import (
    DENIED,
    NOTHING,
    asked,
    attached,
    connected,
    killed,
    restart,
)
from tests.fakes.as_user import as_user, status_of
from tests.fakes.plain_http import NO_TLS

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(240)]
UID = 19902


@pytest.fixture(name="served", scope="module")
def _served() -> Iterator[PlatformUnderTest]:
    """A platform with an instance of a function, whose home a controller that was root has used, as
    in an earlier release."""
    with platform_up(platform={"controller_uid": None}) as platform:
        assert status_of(platform.pid("controller"))["Uid"].split()[0] == "0"
        assert not (platform.local.paths.run / "controller").exists()
        platform.deploy("pair.py")
        platform.result("pair/greet", {"n": 1})
        found = local_platform.find_running(platform.local)
        assert found is not None
        stale_processes.terminate(found.pid, grace_s=STOP_S)
        home = platform.local.paths.home
        for file in (home / "controller").iterdir():
            file.rename(home / file.name)
        (home / "controller").rmdir()
        restart(platform, controller_uid=UID)
        platform.result("pair/greet", {"n": 2})
        yield platform


def code(answer: str) -> str:
    """The error that an operation was answered with; "" = none."""
    return str(json.loads(answer).get("error", {}).get("code", ""))


def attempts(platform: PlatformUnderTest) -> dict[str, Callable[[], str]]:
    """What code in the controller might try, by what it is after."""
    home, run = platform.local.paths.home, platform.local.paths.run
    (instance, *_) = platform.instances("pair", "greet")
    slot = Path(instance["socket"]).parent
    files = [
        home / "platform.key",
        home / "activator.key",
        home / "controller.lock",
        home / "platform.yaml",
        home / "logs/controller.log",
    ]
    files += [
        Path("/etc/shadow"),
        Path("/root/.bashrc"),
        next((home / "activator").rglob("journal-*.ndjson")),
    ]
    directories = [
        home,
        home / "node",
        home / "weights",
        home / "activator",
        home / "logs",
        run,
        run / "controller",
        run / "slots",
        slot,
    ]
    closed = [
        run / "weight_cache.sock",
        run / "snapshotter.sock",
        run / "metrics-snapshotter.sock",
        Path(instance["socket"]),
    ]
    ours = {
        name: platform.pid(name)
        for name in ("snapshotter", "weight_cache", "activator", "controller")
    }
    return {
        **{f"read {file}": lambda file=file: file.read_bytes().hex()[:8] for file in files},  # type: ignore[misc]
        **{
            f"list {folder}": lambda folder=folder: str(os.listdir(folder))  # type: ignore[misc]
            for folder in (*directories, Path("/root"))
        },
        **{
            f"write {folder}": lambda folder=folder: str((folder / "x").write_text("x"))  # type: ignore[misc]
            for folder in directories
        },
        **{f"connect to {path}": lambda path=path: connected(path) for path in closed},  # type: ignore[misc]
        "connect to a shim": lambda: connected(slot / "shim.sock", socket.SOCK_SEQPACKET),
        **{
            f"read the memory of {name}": lambda pid=pid: attached(pid)  # type: ignore[misc]
            for name, pid in ours.items()
        },
        "read the memory of an instance": lambda: attached(instance["pid"]),
        **{
            f"kill {name}": lambda pid=pid: killed(pid)  # type: ignore[misc]
            for name, pid in ours.items()
            if name != "controller"
        },
        "kill an instance": lambda: killed(instance["pid"]),
    }


def test_home_of_an_earlier_release_is_its_own_now(served: PlatformUnderTest) -> None:
    home = served.local.paths.home
    assert (
        "runs as root reason=platform.controller_uid is null"
        in (served.local.logs / "controller.log").read_text()
    )
    for own in (home / "controller", home / "blobs"):
        assert {path.stat().st_uid for path in (own, *own.rglob("*"))} == {UID}
    assert not list(home.glob("controller.db*"))
    wait_for(lambda: len(served.usage()) >= 2, "the calls before and after to be in the ledger")


def test_it_has_a_uid_of_its_own_and_no_capabilities(served: PlatformUnderTest) -> None:
    status = status_of(served.pid("controller"))
    assert status["Uid"].split() == status["Gid"].split() == [str(UID)] * 4
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {
        NOTHING
    }
    assert (status["NoNewPrivs"], status["Seccomp"], status["Groups"]) == ("1", "2", "")
    found = next(
        f
        for f in json.loads(served.cli("doctor", "--json", check=False).stdout)
        if f["what"] == "controller's user"
    )
    assert (found["state"], found["detail"]) == ("ok", f"uid {UID}, without root")


def test_keys_stay_with_root_and_its_socket_with_activators(served: PlatformUnderTest) -> None:
    home, run = served.local.paths.home, served.local.paths.run
    for name in ("platform.key", "activator.key", "controller.lock"):
        assert ((home / name).stat().st_uid, (home / name).stat().st_mode & 0o777) == (0, 0o600)
    status = (run / "controller.sock").stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (0, 19901, 0o660)
    assert as_user(19901, lambda: connected(run / "controller.sock")) == "connected"
    assert as_user(20000, lambda: connected(run / "controller.sock")) == "PermissionError"
    assert (
        as_user(19901, lambda: connected(run / "controller/snapshotter.sock")) == "PermissionError"
    )


def test_deploys_calls_builds_and_weights_go_on(served: PlatformUnderTest, tmp_path: Path) -> None:
    served.deploy("pair.py")
    assert served.result("pair/greet", {"n": 3})[0] == 3
    image = {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "steps": [{"op": "run", "commands": ["exit 7"]}],
    }
    answer = httpx.post(
        f"{served.url}/v1/images", json=image, headers=served.headers, timeout=120, verify=NO_TLS
    )
    assert "status 7" in answer.text, answer.text
    (tmp_path / "model").mkdir()
    (tmp_path / "model/a.bin").write_bytes(os.urandom(100_000))
    served.cli("weights", "push", str(tmp_path / "model"), "--name", "letters")
    served.cli("weights", "pin", "letters")
    assert "letters" in served.cli("weights", "list").stdout
    (instance, *_) = served.instances("pair", "greet")
    assert int(served.cli("instance", "exec", instance["id"], "--", "id", "-u").stdout) >= 20000
    served.cli("instance", "logs", instance["id"])
    served.cli("instance", "stop", instance["id"])
    served.cli("snapshot", "list")


def test_a_backup_is_made_and_checked_while_it_runs(
    served: PlatformUnderTest, tmp_path: Path
) -> None:
    home = served.local.paths.home
    link, target = home / "blobs/aa/link", tmp_path / "target"
    target.write_text("what root alone may read")
    target.chmod(0o600)

    def planted() -> str:
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(target)
        return "planted"

    assert as_user(UID, planted, sees_as=served.pid("controller")) == "planted"
    try:
        served.cli("state", "backup", str(tmp_path / "backup.tar"))
        served.cli("state", "drill")
    finally:
        link.unlink()
    with tarfile.open(tmp_path / "backup.tar") as tar:
        names = tar.getnames()
    assert {"controller.db", "platform.key"} <= {*names}
    assert any(name.startswith("blobs/") for name in names)
    assert "blobs/aa/link" not in names
    assert {path.stat().st_uid for path in (home / "controller").iterdir()} == {UID}, (
        "root has opened nothing there"
    )
    served.cli("token", "create", "--local")
    assert {path.stat().st_uid for path in (home / "controller").iterdir()} == {UID}


@pytest.mark.parametrize(
    "is_inside", [True, False], ids=["in its view of the file system", "in the machine's"]
)
def test_code_that_takes_it_over_reaches_nothing_of_others(
    served: PlatformUnderTest, is_inside: bool
) -> None:
    served.result("pair/greet", {"n": 2})
    sees_as = served.pid("controller") if is_inside else None
    outcomes = {
        name: as_user(UID, attempt, sees_as=sees_as) for name, attempt in attempts(served).items()
    }
    assert {name: said for name, said in outcomes.items() if said not in DENIED} == {}


def test_others_take_from_it_only_what_it_has_to_ask(served: PlatformUnderTest) -> None:
    run, controller = served.local.paths.run / "controller", served.pid("controller")
    (instance, *_) = served.instances("pair", "greet")

    def answer(process: str, op: str, args: dict[str, object]) -> str:
        return code(
            as_user(UID, lambda: asked(run / f"{process}.sock", op, args), sees_as=controller)
        )

    assert answer("snapshotter", "instances", {"labels": {}}) == ""
    spec = {"python": f"{sys.version_info.major}.{sys.version_info.minor}", "steps": []}
    for uid in (0, None, UID, 19999, True, "20000"):
        assert (
            answer("snapshotter", "build_image", {"spec": spec, "uid": uid}) == "order_refused"
        ), uid
        assert (
            answer("snapshotter", "delete_image", {"digest": "a" * 64, "uid": uid})
            == "order_refused"
        ), uid
    for op in ("start", "prepare", "checkpoint", "adopt", "watch"):
        assert answer("snapshotter", op, {}) == "unknown_operation"
    assert answer("snapshotter", "exec", {"instance_id": "../x", "argv": ["id"]}) == "order_refused"
    assert answer("snapshotter", "usage", {"instance_id": instance["id"]}) == ""
    assert answer("weight_cache", "stat", {}) == ""
    assert (
        answer("weight_cache", "predict", {"manifest": "../../platform.key"}) == "manifest_invalid"
    )
    for op in ("open", "wait", "close"):
        assert answer("weight_cache", op, {}) == "unknown_operation"


def test_it_comes_back_without_root_after_it_was_killed(served: PlatformUnderTest) -> None:
    before = len(served.usage())
    served.wait_restarted("controller", served.kill("controller"))
    wait_for(
        lambda: status_of(served.pid("controller"))["Uid"].split()[0] == str(UID),
        "it to give up root",
    )
    served.result("pair/greet", {"n": 2})
    wait_for(lambda: len(served.usage()) > before, "the call to be in the ledger")
    for process in ("snapshotter", "weight_cache"):
        served.wait_restarted(process, served.kill(process))
    wait_for(
        lambda: served.cli("weights", "list", check=False).returncode == 0,
        "the cache to be reached again",
    )
    wait_for(lambda: bool(served.instances("pair", "greet")), "the node agent to be reached again")


def test_root_takes_the_home_back_where_the_uid_is_null_again(served: PlatformUnderTest) -> None:
    restart(served, controller_uid=None)
    assert status_of(served.pid("controller"))["Uid"].split()[0] == "0"
    home = served.local.paths.home
    for own in (home / "controller", home / "blobs"):
        assert {path.stat().st_uid for path in (own, *own.rglob("*"))} == {0}
    assert served.result("pair/greet", {"n": 5})[0] == 5
