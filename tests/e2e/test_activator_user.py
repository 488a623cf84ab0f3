"""The process that parses what strangers send has no root: what it has, and what code that takes it
over reaches."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from pilotlight.cli.supervisor import local_platform, run_platform, stale_processes
from tests.e2e.harness import STOP_S, PlatformUnderTest, platform_up, wait_for
from tests.fakes.as_user import as_user, status_of

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(180)]
UID = 19901
NOTHING = "0" * 16
DENIED = {"PermissionError", "FileNotFoundError", "ProcessLookupError"}


@pytest.fixture(name="served", scope="module")
def _served() -> Iterator[PlatformUnderTest]:
    """A platform with an instance of a function, whose home an activator that was root has used, as
    in an earlier release."""
    with platform_up(platform={"activator_uid": None}) as platform:
        assert status_of(platform.pid("activator"))["Uid"].split()[0] == "0"
        assert platform.local.paths.run.stat().st_mode & 0o777 == 0o700
        platform.deploy("pair.py")
        platform.result("pair/greet", {"n": 1})
        restart(platform, activator_uid=UID)
        platform.result("pair/greet", {"n": 2})
        yield platform


def restart(platform: PlatformUnderTest, **settings: object) -> None:
    """The same home under other settings of section `platform`."""
    if (found := local_platform.find_running(platform.local)) is not None:
        stale_processes.terminate(found.pid, grace_s=STOP_S)
    sections = yaml.safe_load(platform.local.config.read_text())
    platform.local.config.write_text(
        yaml.safe_dump({**sections, "platform": {**sections["platform"], **settings}})
    )
    for _ in run_platform.detach(platform.local):
        pass


def asked(path: Path, op: str, args: dict[str, object]) -> str:
    """The answer of one of the platform's sockets."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(str(path))
        connection.sendall(json.dumps({"id": 1, "op": op, "args": args}).encode() + b"\n")
        return connection.makefile().readline()


def connected(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> str:
    with socket.socket(socket.AF_UNIX, kind) as connection:
        connection.connect(str(path))
        return "connected"


def attached(pid: int) -> str:
    with Path(f"/proc/{pid}/mem").open("rb"):
        return "opened its memory"


def killed(pid: int) -> str:
    os.kill(pid, 0)
    return "may be killed"


def attempts(platform: PlatformUnderTest) -> dict[str, Callable[[], str]]:
    """What code in an activator might try, by what it is after."""
    home, run = platform.local.paths.home, platform.local.paths.run
    (instance,) = platform.instances("pair", "greet")
    slot, agent = Path(instance["socket"]).parent, platform.pid("snapshotter")
    kept = (
        "platform.key",
        "activator.key",
        "controller/controller.db",
        "platform.yaml",
        "logs/controller.log",
    )
    files = [home / name for name in kept]
    directories = [
        home,
        home / "blobs",
        home / "node",
        home / "weights",
        home / "activator",
        run,
        run / "slots",
        slot,
    ]
    ours = {name: platform.pid(name) for name in ("snapshotter", "controller", "activator")}
    inside = Path(f"/proc/{instance['pid']}/root/run/pilotlight/slot/work")
    return {
        **{f"read {file}": lambda file=file: file.read_bytes().hex()[:8] for file in files},  # type: ignore[misc]
        **{
            f"list {folder}": lambda folder=folder: str(os.listdir(folder))  # type: ignore[misc]
            for folder in (*directories, inside)
        },
        **{
            f"write {folder}": lambda folder=folder: str((folder / "x").write_text("x"))  # type: ignore[misc]
            for folder in directories
        },
        "connect to a shim": lambda: connected(slot / "shim.sock", socket.SOCK_SEQPACKET),
        "connect to the weight cache": lambda: connected(run / "weight_cache.sock"),
        "connect to metrics": lambda: connected(run / "metrics-controller.sock"),
        **{
            f"read the memory of {name}": lambda pid=pid: attached(pid)  # type: ignore[misc]
            for name, pid in ours.items()
        },
        "read the memory of an instance": lambda: attached(instance["pid"]),
        "kill the node agent": lambda: killed(agent),
        "kill an instance": lambda: killed(instance["pid"]),
    }


def test_home_of_an_earlier_release_is_its_own_now(served: PlatformUnderTest) -> None:
    assert (
        "runs as root reason=platform.activator_uid is null"
        in (served.local.logs / "activator.log").read_text()
    )
    own = served.local.paths.home / "activator" / "a-0"
    assert {path.stat().st_uid for path in (own, *own.rglob("*"))} == {UID}
    wait_for(lambda: len(served.usage()) >= 2, "the calls before and after to be in the ledger")


def test_activator_has_a_uid_of_its_own_and_no_capabilities(served: PlatformUnderTest) -> None:
    status = status_of(served.pid("activator"))
    assert status["Uid"].split() == status["Gid"].split() == [str(UID)] * 4
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {
        NOTHING
    }
    assert (status["NoNewPrivs"], status["Seccomp"], status["Groups"]) == ("1", "2", "")
    assert served.local.paths.home.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "is_inside", [True, False], ids=["in its view of the file system", "in the machine's"]
)
def test_code_that_takes_it_over_reaches_nothing_of_others(
    served: PlatformUnderTest, is_inside: bool
) -> None:
    sees_as = served.pid("activator") if is_inside else None
    outcomes = {
        name: as_user(UID, attempt, sees_as=sees_as) for name, attempt in attempts(served).items()
    }
    assert {name: said for name, said in outcomes.items() if said not in DENIED} == {}


def test_node_agent_takes_from_it_only_what_the_controller_sealed(
    served: PlatformUnderTest,
) -> None:
    agent = served.local.paths.run / "snapshotter.sock"
    activator = served.pid("activator")
    (instance,) = served.instances("pair", "greet")

    def answer(op: str, args: dict[str, object]) -> dict[str, object]:
        said: dict[str, object] = json.loads(
            as_user(UID, lambda: asked(agent, op, args), sees_as=activator)
        )
        return said

    routes = (served.local.paths.home / "activator/a-0/routes.ndjson").read_text().splitlines()
    values = [change["value"] for change in map(json.loads, routes) if change["kind"] == "function"]
    launch = next(iter(values[-1]["revisions"].values()))["launch"]
    order = {"instance_id": "i-00000000000000ff", "lessee": "a-0", "secret_env": {}}
    assert "ok" in answer("instances", {"labels": {}})
    changes: list[dict[str, object]] = [{"uid": 0}, {"uid": launch["uid"] + 1}, {"labels": {}}]
    for change in changes:
        refused = answer("start", {**order, "launch": {**launch, **change}})
        assert refused["error"]["code"] == "order_refused", refused  # type: ignore[index]
    assert (
        answer("exec", {"instance_id": instance["id"], "argv": ["id"]})["error"]["code"]  # type: ignore[index]
        == "unknown_operation"
    )
    assert "ok" in answer("prepare", {"launch": launch}), "its own is taken"


def test_calls_go_on_and_are_billed_after_it_was_killed(served: PlatformUnderTest) -> None:
    before = len(served.usage())
    served.wait_restarted("activator", served.kill("activator"))
    assert status_of(served.pid("activator"))["Uid"].split()[0] == str(UID)
    served.result("pair/greet", {"n": 2})
    wait_for(lambda: len(served.usage()) > before, "the call to be in the ledger")


def test_sockets_of_instances_that_an_agent_adopts_are_open_to_it(
    served: PlatformUnderTest,
) -> None:
    (instance,) = served.instances("pair", "greet")
    path = Path(instance["socket"])
    os.chown(path, 0, 0)
    os.chown(path.parent, 0, 0)
    path.parent.chmod(0o700)
    assert (
        as_user(UID, lambda: connected(path), sees_as=served.pid("activator")) == "PermissionError"
    ), "as an earlier release made them"
    served.wait_restarted("snapshotter", served.kill("snapshotter"))
    wait_for(
        lambda: (
            as_user(UID, lambda: connected(path), sees_as=served.pid("activator")) == "connected"
        ),
        "the socket to be open",
    )
    assert served.result("pair/greet", {"n": 4})[0] == 4
