"""Snapshots on a real platform: four processes, CRIU, user code. A function with nothing in memory
comes back, and is the same one."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest

from pilotlight.protocol import HEADER_COST, HEADER_REQUEST_ID, HEADER_SERVER_TIMING, HEADER_START
from tests.conftest import RequireOrSkip
from tests.e2e.frozen import ATTEMPTS, DEPLOYED_S, Frozen, environ, why_no_criu
from tests.e2e.harness import APPS, PlatformUnderTest, platform_up, wait_for
from tests.fakes.host_address import host_address

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(DEPLOYED_S)]
APP = str(APPS / "frozen.py")
ANSWER_S = 45.0
"""For a start that falls to COLD, well below the 300 s of a startup: boots give way to calls, on a
busy machine for ten seconds."""
TOKEN = "tok-1f0c-planted-before-the-snapshot"


@pytest.fixture(scope="module")
def deploy_output() -> list[str]:
    """What the deploy of the module's app printed."""
    return []


@pytest.fixture(scope="module")
def listening() -> Iterator[int]:
    """A port of the host where connections are taken, and nothing is said."""
    with socket.create_server((host_address(), 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(scope="module")
def frozen(
    require_or_skip: RequireOrSkip, deploy_output: list[str], listening: int
) -> Iterator[Frozen]:
    if (why := why_no_criu()) is not None:
        require_or_skip(why)
    opened: dict[str, object] = {"egress_allowed": [host_address()]}
    with (
        platform_up(snapshotter=opened) as platform,
        environ(FROZEN_PEER=f"{host_address()}:{listening}"),
    ):
        set_secret(platform)
        deploy_output += platform.cli("deploy", APP).stdout.splitlines()
        yield Frozen(platform, "frozen")


def set_secret(platform: PlatformUnderTest, *, token: str = TOKEN, mood: str = "") -> None:
    with platform.client() as client:
        client.put_secret("vault", {"VAULT_TOKEN": token, "MOOD": mood})


def lines_of(output: list[str], function: str) -> str:
    """What deploy says of one function."""
    at = next(n for n, line in enumerate(output) if line.split()[:1] == [function])
    end = next(
        (n for n, line in enumerate(output[at + 1 :], at + 1) if line[:3].strip()), len(output)
    )
    return "\n".join(output[at:end])


# -- the whole way ---------------------------------------------------------------------------------
def test_deploy_makes_and_proves_a_snapshot_and_says_cold_restore_and_fork(
    frozen: Frozen, deploy_output: list[str]
) -> None:
    said = lines_of(deploy_output, "Greeter").splitlines()[0]
    cold, restore, fork = said.index("cold "), said.index("restore "), said.index("fork ")
    assert cold < restore < fork
    made, heavy = frozen.wait_ready("Greeter"), frozen.wait_ready("Lottery")
    assert made["restore_ms"] > 0
    # whose imports take seconds: of two short times a busy machine makes either
    assert 0 < heavy["restore_ms"] < heavy["cold_ms"]
    assert {"quiesce", "dump", "publish", "prove"} <= made["phases_ms"].keys()
    assert made["id"] in frozen.platform.cli("snapshot", "list", "frozen").stdout
    assert "must be the same" in frozen.platform.cli("snapshot", "show", made["id"]).stdout


def test_with_nothing_in_memory_a_call_is_a_restore_and_says_so_everywhere(frozen: Frozen) -> None:
    answer = frozen.call_from_zero("Greeter.square", {"n": 12})
    assert (answer.json(), answer.headers[HEADER_START]) == (144, "RESTORE")
    assert "start;dur=" in answer.headers[HEADER_SERVER_TIMING]
    record = wait_for(
        lambda: frozen.platform.usage("call = ?", answer.headers[HEADER_REQUEST_ID]),
        "the call's record",
    )[0]
    assert (record["start_kind"], record["outcome"], record["status"]) == ("RESTORE", "ok", 200)
    assert record["start_ms"] > 0
    assert 0 < Decimal(record["cost"]) == Decimal(answer.headers[HEADER_COST])
    assert frozen.metric("pilotlight_starts_total", kind="RESTORE", outcome="ready") >= 1
    with frozen.platform.client() as client:
        phases = next(i for i in client.instances(app="frozen") if i["id"] == record["instance"])[
            "phases_ms"
        ]
    assert {"slot", "prefetch", "restore", "revive", "serve", "wake"} <= phases.keys()


def test_after_a_restore_a_template_comes_back_and_the_next_start_is_a_fork(frozen: Frozen) -> None:
    frozen.restored("Greeter.square", {"n": 3})
    wait_for(lambda: frozen.has_template("Greeter"), "the Template to be back")
    with meeting(2) as port, ThreadPoolExecutor(2) as pool:
        answers = list(
            pool.map(
                lambda _: frozen.call("Greeter.who", {"met": [host_address(), port]}), range(2)
            )
        )
    assert {a.headers[HEADER_START] for a in answers} == {"WARM", "FORK"}
    assert len({a.json() for a in answers}) == 2


def test_what_is_printed_after_a_restore_is_in_the_logs(frozen: Frozen) -> None:
    frozen.restored("Greeter.square", {"n": 31})
    wait_for(lambda: "squaring 31" in frozen.platform.cli("logs", "frozen").stdout, "the line")


# -- secrets ---------------------------------------------------------------------------------------
def test_no_byte_of_a_secret_is_in_the_snapshot_and_a_restored_function_has_its_value_of_now(
    frozen: Frozen,
) -> None:
    snapshot = frozen.directory(frozen.wait_ready("Keeper")["id"])
    files = [path for path in snapshot.rglob("*") if path.is_file()]
    assert any(path.name.startswith("pages-") for path in files)
    assert [path.name for path in files if TOKEN.encode() in path.read_bytes()] == []
    assert frozen.restored("Keeper.token") == TOKEN

    set_secret(frozen.platform, token="tok-changed")
    assert wait_for(lambda: frozen.restored("Keeper.token") == "tok-changed", "the new value")
    assert frozen.wait_ready("Keeper")["id"] == snapshot.name


def test_a_secret_that_is_read_before_the_snapshot_is_refused_by_name(frozen: Frozen) -> None:
    done = frozen.platform.cli("deploy", str(APPS / "hasty.py"), check=False)
    assert done.returncode == 1
    assert "hasty.py:16 reads the secret VAULT_TOKEN" in done.stderr
    assert "snap=False" in done.stderr
    assert TOKEN not in done.stderr + done.stdout


# -- what stands in the way ------------------------------------------------------------------------
def test_a_connection_that_enter_left_open_is_named_and_the_function_works_by_fork(
    frozen: Frozen, deploy_output: list[str], listening: int
) -> None:
    said = lines_of(deploy_output, "Dialer")
    assert "restore" not in said
    assert "descriptor" in said
    assert f"TCP to {host_address()}:{listening}" in said
    line = next(
        n
        for n, text in enumerate(Path(APP).read_text().splitlines(), 1)
        if "self.peer = socket" in text
    )
    assert said.count(f"frozen.py:{line}") == 1
    assert frozen.snapshots("Dialer", state=None) == []
    assert frozen.call("Dialer.ask").json() == "fine"

    again = frozen.json("deploy", APP)
    reasons = next(f for f in again["proofs"] if f["function"] == "Dialer")["snapshot"]["refused"]
    assert [(r["kind"], r["where"]) for r in reasons] == [("connection", f"frozen.py:{line}")]
    assert isinstance(reasons[0]["fd"], int)


def test_a_function_that_wants_none_has_none(frozen: Frozen, deploy_output: list[str]) -> None:
    assert "snapshot=False" in lines_of(deploy_output, "Never")
    assert frozen.call_from_zero("Never.ask").headers[HEADER_START] == "COLD"
    assert frozen.snapshots("Never", state=None) == []


# -- uniqueness and time ---------------------------------------------------------------------------
def test_instances_of_one_snapshot_differ_in_all_that_must_differ(frozen: Frozen) -> None:
    """But in the host name, which is their slot's: starts at once share a restore, and its slot."""
    answers = called_together(frozen, "Lottery.draw", 4)
    drawn = [answer.json() for answer in answers]
    restored = [d for d in drawn if d["frozen_s"] is not None]
    assert len(restored) >= 2, [a.headers[HEADER_START] for a in answers]
    for what in (
        "random",
        "numpy",
        "torch",
        "ssl",
        "secrets",
        "uuid1",
        "uuid4",
        "tempfile",
        "instance",
    ):
        assert len({d[what] for d in drawn}) == len(drawn), what
    for one in drawn:
        assert abs(one["now"] - time.time()) < 30
    for one in restored:
        age_s = time.time() - frozen.wait_ready("Lottery")["created_at"]
        assert age_s - 30 < float(one["frozen_s"]) <= age_s + 1


def test_several_at_once_from_zero_are_each_in_an_instance_of_its_own(frozen: Frozen) -> None:
    answers = called_together(frozen, "Listener.ask_itself", 4)
    # each has the same port, in a network of its own, and found itself there
    assert len({a.json() for a in answers}) == 4
    assert [a.headers[HEADER_START] for a in answers] == ["RESTORE"] * 4


def called_together(frozen: Frozen, address: str, count: int) -> list[httpx.Response]:
    """So many calls from zero, of which none ends before all of them run: one instance cannot
    answer two. The autoscaler may bring one back before them; then all are stopped again."""
    for _ in range(ATTEMPTS):
        frozen.to_zero(address.partition(".")[0])
        with meeting(count) as port, ThreadPoolExecutor(count) as pool:
            answers = list(
                pool.map(
                    lambda _: frozen.call(address, {"met": [host_address(), port]}), range(count)
                )
            )
        if not {"WARM", "WAKE"} & {answer.headers[HEADER_START] for answer in answers}:
            return answers
    raise AssertionError(f"{address} was never at zero")


@contextlib.contextmanager
def meeting(count: int) -> Iterator[int]:
    """A server on all of the host's addresses that greets its guests once so many have come; its
    port."""
    with socket.create_server(("0.0.0.0", 0)) as server, contextlib.ExitStack() as guests:

        def serve() -> None:
            with contextlib.suppress(OSError):
                for guest in [guests.enter_context(server.accept()[0]) for _ in range(count)]:
                    guest.sendall(b"all are here")

        thread = threading.Thread(target=serve, name="meeting")
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            thread.join()


# -- hooks -----------------------------------------------------------------------------------------
def test_hooks_run_after_each_restore_and_when_the_instance_stops(frozen: Frozen) -> None:
    for _ in range(2):
        assert frozen.restored("Keeper.history") == ["enter", "connect"]
    frozen.to_zero("Keeper")
    wait_for(
        lambda: "the hook says goodbye" in frozen.platform.cli("logs", "frozen").stdout,
        "the exit hook's line",
    )


@pytest.mark.parametrize("mood", ["raise-restored", "hang-restored"])
def test_a_hook_that_fails_after_a_restore_only_lets_the_call_fall_to_cold(
    frozen: Frozen, mood: str
) -> None:
    set_secret(frozen.platform, mood=mood)
    try:
        answer = wait_for(
            lambda: only_if(frozen.try_from_zero("Keeper.history"), "COLD"),
            "the secret to be known",
        )
        assert answer.json() == ["enter", "connect"]
        assert answer.elapsed.total_seconds() < ANSWER_S
    finally:
        set_secret(frozen.platform)
    assert (
        wait_for(
            lambda: only_if(frozen.try_from_zero("Keeper.history"), "RESTORE"), "RESTORE to be back"
        ).status_code
        == 200
    )


@pytest.mark.parametrize("mood, word", [("raise", "bad mood"), ("hang", "connect")])
def test_a_hook_that_fails_everywhere_is_the_callers_error_in_due_time(
    frozen: Frozen, mood: str, word: str
) -> None:
    set_secret(frozen.platform, mood=mood)
    try:
        answer = wait_for(
            lambda: failed(frozen.try_from_zero("Keeper.history")), "the secret to be known"
        )
        assert answer.elapsed.total_seconds() < ANSWER_S
        assert answer.status_code >= 500
        assert word in answer.text
    finally:
        set_secret(frozen.platform)
    wait_for(
        lambda: frozen.platform.post("frozen/Keeper.history").status_code == 200,
        "the function to work again",
    )


def only_if(answer: httpx.Response, start: str) -> httpx.Response | None:
    return (
        answer if answer.headers.get(HEADER_START) == start and answer.status_code == 200 else None
    )


def failed(answer: httpx.Response) -> httpx.Response | None:
    return answer if answer.status_code != 200 else None


# -- servers ---------------------------------------------------------------------------------------
def test_threads_and_a_subprocess_come_back_with_their_function(frozen: Frozen) -> None:
    assert frozen.wait_ready("Crew")["in_place"]
    assert frozen.restored("Crew.reverse", {"text": "pilot"}) == "tolip"
    before, after = frozen.call("Crew.ticking").json()
    assert after > before > 0


def test_a_pool_of_processes_comes_back_with_its_function(frozen: Frozen) -> None:
    assert frozen.restored("Team.absolute", {"n": 7}) == 7


def test_a_web_application_with_an_example_comes_back_built(frozen: Frozen) -> None:
    def get(path: str) -> httpx.Response:
        return httpx.get(
            f"{frozen.platform.url}/fn/frozen/site{path}",
            headers=frozen.platform.headers,
            timeout=60,
        )

    made = frozen.wait_ready("site")
    for _ in range(4):
        frozen.to_zero("site")
        asked_at = time.time()
        answer = get("/age")
        if answer.headers[HEADER_START] == "RESTORE":
            break
    body = answer.json()
    assert (answer.headers[HEADER_START], body["restored"]) == ("RESTORE", True)
    assert body["age_s"] > asked_at - made["created_at"]
    assert get("/health").json() == {"state": "fine"}


# -- files -----------------------------------------------------------------------------------------
def test_files_of_before_the_snapshot_are_there_after_it(frozen: Frozen) -> None:
    expected: dict[str, Any] = {
        "work": "in the working directory",
        "tmp": "in the temporary directory",
        "shm": "in shared memory",
        "log": ["before", "and"],
        "deleted": "has no name",
        "semaphore": 2,
    }
    assert frozen.restored("Files.look") == expected
    assert (frozen.directory(frozen.wait_ready("Files")["id"]) / "files.tar").stat().st_size > 0


# -- commands --------------------------------------------------------------------------------------
def test_prove_restores_it_once_more(frozen: Frozen) -> None:
    proven = frozen.json("snapshot", "prove", frozen.wait_ready("Greeter")["id"])
    assert proven["state"] == "READY"


def test_a_deleted_snapshot_is_gone_from_the_disk_and_made_again_behind_a_cold_start(
    frozen: Frozen,
) -> None:
    gone = frozen.wait_ready("Heavy")["id"]
    assert frozen.directory(gone).is_dir()
    frozen.platform.cli("snapshot", "delete", gone, "--yes")
    assert not frozen.directory(gone).exists()
    assert frozen.call_from_zero("Heavy.size").headers[HEADER_START] == "COLD"
    assert frozen.wait_ready("Heavy")["id"] != gone
    assert frozen.restored("Heavy.size") == 192 * 1024 * 1024


def test_disable_takes_it_off_the_disk_and_enable_lets_the_next_deploy_make_one(
    frozen: Frozen,
) -> None:
    frozen.platform.cli("snapshot", "disable", "frozen/Greeter", "--yes")
    assert frozen.snapshots("Greeter", state=None) == []
    wait_for(
        lambda: frozen.call_from_zero("Greeter.square", {"n": 2}).headers[HEADER_START] == "COLD",
        "COLD",
    )
    frozen.platform.cli("snapshot", "enable", "frozen/Greeter")
    frozen.platform.cli("deploy", APP)
    frozen.wait_ready("Greeter")
    assert frozen.restored("Greeter.square", {"n": 2}) == 4


def test_a_rollback_starts_by_restore_and_a_deleted_app_leaves_no_image(
    frozen: Frozen, tmp_path: Path
) -> None:
    platform, file = frozen.platform, tmp_path / "versioned.py"
    text = (
        "import pilotlight\napp = "
        "pilotlight.App('versioned')\n\n@app.function(example=[])\ndef answer() -> int:\n    "
        "return {}\n"
    )
    versioned = Frozen(platform, "versioned")
    for version in (1, 2):
        file.write_text(text.format(version))
        platform.cli("deploy", str(file))
        assert versioned.call("answer").json() == version
    assert len(versioned.snapshots("answer")) == 2
    file.write_text(text.format(1))
    platform.cli("deploy", str(file), "--no-wait")
    answer = wait_for(lambda: only_if(versioned.try_from_zero("answer"), "RESTORE"), "a restore")
    assert answer.json() == 1
    directories = [versioned.directory(s["id"]) for s in versioned.snapshots("answer")]
    assert all(d.is_dir() for d in directories)
    platform.cli("app", "delete", "versioned", "--yes")
    wait_for(lambda: not any(d.exists() for d in directories), "the images to be gone")


def test_doctor_says_that_snapshots_are_on(frozen: Frozen) -> None:
    checks = frozen.platform.cli("doctor", check=False).stdout
    assert "snapshot" in checks.lower()
    assert "restore" in checks.lower()
