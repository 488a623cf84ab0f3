"""What user code may do wrong, on a real platform: a named error for its caller, nothing for its
neighbours."""

from __future__ import annotations

import importlib.util
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Self

import httpx
import pytest

from pilotlight.client import sessions
from pilotlight.protocol import PROBLEM_BASE
from pilotlight.sdk.function import Function
from tests.e2e.harness import APPS, PlatformUnderTest, wait_for

SOON_S = 15.0
"""For an answer that waits for nothing but a clock of 3 s, on a busy machine; the caller would wait
for a minute."""
BOOTED_S = 45.0
"""For one that waits for a boot, which gives way to calls; a start may take 300 s."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


@pytest.fixture(scope="module", autouse=True)
def _deployed(platform: PlatformUnderTest) -> None:
    platform.deploy("faulty.py")


@pytest.fixture
def faulty() -> Iterator[ModuleType]:
    """The app's module, under the name that it has on the platform."""
    spec = importlib.util.spec_from_file_location("faulty", APPS / "faulty.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["faulty"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["faulty"]


@pytest.fixture
def warm_neighbour(platform: PlatformUnderTest) -> str:
    """Id of the neighbour's instance."""
    assert platform.result("faulty/neighbour") == "fine"
    return str(platform.instances("faulty", "neighbour")[0]["id"])


def problem(answer: httpx.Response, status: int, kind: str) -> dict[str, object]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, object] = answer.json()
    assert body["type"] == PROBLEM_BASE + kind
    assert body["instance"] == answer.headers["x-request-id"]
    return body


class Prober:
    """Calls a function over and over from a thread of its own, and keeps how long each call took
    (seconds)."""

    def __init__(self, platform: PlatformUnderTest, function: str) -> None:
        self._platform = platform
        self._function = function
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prober")
        self.took_s: list[float] = []
        self.failed: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client(headers=self._platform.headers, timeout=60) as client:
            while not self._ended.wait(0.01):
                began = time.monotonic()
                answer = client.post(
                    f"{self._platform.url}/v1/functions/{self._function}:invoke", json={}
                )
                self.took_s.append(time.monotonic() - began)
                if answer.status_code != 200:
                    self.failed.append(answer.text)


# -- raises ----------------------------------------------------------------------------------------
def test_an_exception_reaches_the_sdk_as_its_own_type_with_the_remote_traceback(
    platform: PlatformUnderTest, faulty: ModuleType
) -> None:
    with sessions.use_profile(platform.profile), pytest.raises(faulty.OrderRejected) as raised:
        faulty.refuse.remote(7)
    assert raised.value.order == 7
    assert str(raised.value) == "order 7 is rejected"
    notes = "\n".join(raised.value.__notes__)
    assert "Remote traceback" in notes
    assert "raise OrderRejected(order)" in notes
    assert "pilotlight/worker" not in notes


def test_an_exception_of_a_spawned_call_reaches_the_sdk_too(
    platform: PlatformUnderTest, faulty: ModuleType
) -> None:
    with sessions.use_profile(platform.profile):
        call = faulty.refuse.spawn(8)
        with pytest.raises(faulty.OrderRejected, match="order 8"):
            call.get(timeout=30)


def test_over_http_an_exception_is_a_problem_without_internals(platform: PlatformUnderTest) -> None:
    answer = platform.post("faulty/refuse", {"order": 7})
    body = problem(answer, 500, "function-raised")
    assert body["error"] == {"type": "faulty.OrderRejected", "message": "order 7 is rejected"}
    for internal in ("Traceback", "internal-7", "site-packages", ".py", "/run/pilotlight"):
        assert internal not in answer.text


def test_a_call_that_raised_is_in_the_ledger_once(platform: PlatformUnderTest) -> None:
    call = platform.post("faulty/refuse", {"order": 7}).headers["x-request-id"]
    records = wait_for(lambda: platform.usage("call = ?", call), "the call's record")
    assert [(r["outcome"], r["status"]) for r in records] == [("error", 500)]


# -- never returns ---------------------------------------------------------------------------------
def test_a_call_that_never_returns_ends_at_its_clock_and_a_second_caller_is_served_by_another_instance(
    platform: PlatformUnderTest,
) -> None:
    first = platform.result("faulty/stubborn", {"forever": False})
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(platform.post, "faulty/stubborn", {"forever": True})
        wait_for(
            lambda: platform.post("faulty/stubborn", {"forever": False}).text.strip('"') != first,
            "an answer beside the hanging call",
        )
        second = platform.result("faulty/stubborn", {"forever": False})
        body = problem(hanging.result(), 504, "deadline-exceeded")
    assert body["clock"] == "execution"
    assert 3.0 <= hanging.result().elapsed.total_seconds() < SOON_S
    assert second != first
    wait_for(
        lambda: first not in [i["id"] for i in platform.instances("faulty", "stubborn")],
        "the stuck instance to leave service",
    )
    assert platform.result("faulty/stubborn", {"forever": False}) != first


# -- dies ------------------------------------------------------------------------------------------
def test_a_function_that_kills_its_process_is_answered_502_with_the_reason_and_replaced(
    platform: PlatformUnderTest,
) -> None:
    assert platform.result("faulty/suicide", {"die": False}) == "alive"
    (before,) = [i["id"] for i in platform.instances("faulty", "suicide")]
    began = time.monotonic()
    body = problem(platform.post("faulty/suicide", {"die": True}), 502, "worker-crashed")
    assert time.monotonic() - began < SOON_S
    assert body["reason"] == "killed"
    assert body["worker"] == before
    assert platform.result("faulty/suicide", {"die": False}) == "alive"
    assert before not in [i["id"] for i in platform.instances("faulty", "suicide")]


@pytest.mark.root
def test_running_out_of_memory_is_a_named_error_and_costs_one_instance(
    platform: PlatformUnderTest, warm_neighbour: str
) -> None:
    assert platform.result("faulty/devour", {"mebibytes": 1}) == 1
    (victim,) = [i["id"] for i in platform.instances("faulty", "devour")]
    templates = platform.templates()
    with Prober(platform, "faulty/neighbour") as prober:
        answer = platform.post("faulty/devour", {"mebibytes": 4096})
    body = problem(answer, 502, "worker-crashed")
    assert body["reason"] == "out_of_memory"
    assert "out of memory" in str(body["detail"])
    assert prober.failed == []
    assert platform.result("faulty/devour", {"mebibytes": 1}) == 1
    (replacement,) = [i["id"] for i in platform.instances("faulty", "devour")]
    assert replacement != victim
    assert warm_neighbour in [i["id"] for i in platform.instances("faulty", "neighbour")]
    after = platform.templates()
    assert {t["pid"] for t in templates} <= {t["pid"] for t in after}
    records = wait_for(
        lambda: platform.usage("call = ?", answer.headers["x-request-id"]),
        "the record of the call that died",
    )
    assert [(r["outcome"], r["status"], r["instance"]) for r in records] == [("error", 502, victim)]


# -- prints ----------------------------------------------------------------------------------------
def test_a_function_that_prints_100_mb_answers_and_neither_fills_the_disk_nor_slows_its_neighbour(
    platform: PlatformUnderTest, warm_neighbour: str
) -> None:
    assert platform.result("faulty/chatter", {"megabytes": 0}) == 0
    with Prober(platform, "faulty/neighbour") as prober:
        assert platform.result("faulty/chatter", {"megabytes": 100}) > 100_000_000
    assert prober.failed == []
    assert statistics.median(prober.took_s) < 1.0
    logs = platform.local.paths.home / "node" / "logs"
    size = sum(file.stat().st_size for file in logs.rglob("*") if file.is_file())
    # two files of log_max_bytes (10 MiB) for the chatterbox, and a little for the others
    assert size < 40 * 1024 * 1024
    with platform.client() as client:
        lines = list(client.logs(app="faulty", function="chatter", tail=5))
    assert "x" * 99 in [line["text"] for line in lines]


# -- does not start --------------------------------------------------------------------------------
def test_a_missing_import_fails_the_call_at_once_and_names_the_module_with_the_log(
    platform: PlatformUnderTest,
) -> None:
    platform.deploy("incomplete.py")
    began = time.monotonic()
    answer = platform.post("incomplete/double", {"n": 1})
    assert time.monotonic() - began < BOOTED_S
    body = problem(answer, 502, "start-failed")
    error, log_tail = body["error"], body["log_tail"]
    assert isinstance(error, dict)
    assert isinstance(log_tail, list)
    assert error["type"] == "ModuleNotFoundError"
    assert "colourful_numbers" in error["message"]
    assert error["phase"] == "import"
    assert any("about to import what is not there" in str(line) for line in log_tail)
    assert platform.instances("incomplete", "double") == []


def test_a_missing_import_tells_the_sdk_the_module(platform: PlatformUnderTest) -> None:
    from pilotlight.errors import StartFailed

    platform.deploy("incomplete.py")
    with (
        sessions.use_profile(platform.profile),
        pytest.raises(StartFailed, match="colourful_numbers"),
    ):
        Function.from_name("incomplete", "double").remote(1)
