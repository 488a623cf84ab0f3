"""Functions that call functions: on a whole platform, after every kind of start."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from pilotlight.protocol import HEADER_REQUEST_ID, HEADER_START
from tests.conftest import RequireOrSkip
from tests.e2e.frozen import DEPLOYED_S, Frozen, why_no_criu
from tests.e2e.harness import PlatformUnderTest, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(DEPLOYED_S)]
N = 3
EVERYTHING = {
    "remote": 9,
    "map": [0, 1, 4],
    "stream": [0, 1, 2],
    "spawn": 9,
    "raises": "-1 is negative",
}


@pytest.fixture(scope="module")
def calling(platform: PlatformUnderTest) -> Frozen:
    platform.deploy("calling.py")
    return Frozen(platform, "calling")


def expect_everything(found: dict[str, Any]) -> None:
    assert {key: found[key] for key in EVERYTHING} == EVERYTHING
    before, after = found["too early"]
    assert "not in enter() before the snapshot" in before
    assert "not in enter(snap=False)" in after


def test_a_function_calls_others_after_a_cold_start_and_the_records_name_it(
    calling: Frozen,
) -> None:
    answer = calling.call("Caller.everything", {"n": N})
    assert answer.headers[HEADER_START] in ("COLD", "FORK")
    expect_everything(answer.json())
    assert calling.call("Caller.aio", {"n": N}).json() == [[0, 1, 2], [0, 1, 4], 9]

    outer = answer.headers[HEADER_REQUEST_ID]
    parent = f"{outer}/1"
    wait_for(
        lambda: len(calling.platform.usage("parent = ?", parent)) == 7,
        "records of the calls that it made",
    )
    made = calling.platform.usage("parent = ?", parent)
    assert {row["function"] for row in made} == {"square", "count"}
    assert {row["key"].partition("/")[2] for row in made} == {"main/calling/Caller"}
    (own,) = calling.platform.usage("id = ?", parent)
    assert own["instance"] == answer.json()["instance"]


@pytest.mark.root
def test_after_a_restore_and_a_fork_it_calls_again_and_the_snapshot_has_no_trace_of_it(
    calling: Frozen, require_or_skip: RequireOrSkip
) -> None:
    if (why := why_no_criu()) is not None:
        require_or_skip(why)
    snapshot = calling.directory(calling.wait_ready("Caller")["id"])
    first = calling.restored("Caller.everything", {"n": N})
    expect_everything(first)
    wait_for(lambda: calling.has_template("Caller"), "the Template behind the restored instance")
    with calling.platform.client() as client:
        client.stop_instance(first["instance"])
    forked = calling.call("Caller.everything", {"n": N})
    expect_everything(forked.json())
    assert forked.json()["instance"] != first["instance"]

    connections = json.loads((snapshot / "manifest.json").read_text())["point"]
    assert (connections["obstacles"], connections["connections_inside"]) == ([], 0)
    content = b"".join(file.read_bytes() for file in snapshot.rglob("*") if file.is_file())
    assert b"PILOTLIGHT_CALLS=" in content, "where the sockets are"
    assert re.findall(rb"calls/i-[0-9a-f]{16}\.sock", content) == [], "and none of them"


def test_a_route_starts_a_call_that_goes_on_without_it(calling: Frozen) -> None:
    platform = calling.platform
    answer = httpx.get(f"{platform.url}/fn/calling/web/", headers=platform.headers, timeout=60)
    assert answer.status_code == 202, answer.text
    with platform.client() as client:
        record = client.call(answer.text, wait_s=20)
    assert record.state == "SUCCEEDED"
    assert record.labels["caller"] == "calling/web"


def test_functions_that_call_each_other_without_end_get_an_error_that_names_them(
    calling: Frozen,
) -> None:
    answer = calling.platform.post("calling/forever", {"n": 0}, timeout=120)
    assert answer.status_code == 500
    said = answer.json()["error"]["message"]
    assert said.startswith("call depth 16 reached: calling/forever → calling/forever")


def test_a_call_has_the_time_that_its_caller_has_left(calling: Frozen) -> None:
    answer = calling.platform.post(
        "calling/Caller.late",
        {"seconds": 30},
        headers={**calling.platform.headers, "pilotlight-timeout": "2"},
    )
    assert (answer.status_code, answer.json()) == (200, "too late")


@pytest.mark.parametrize(
    "method, path",
    [
        ("POST", "/t/other/v1/functions/calling/square:invoke"),
        ("GET", "/v1/apps"),
        ("POST", "/v1/apps/calling/deploy"),
        ("GET", "/internal/feed"),
    ],
)
def test_nothing_but_calls_of_its_own_tenant_is_served(
    calling: Frozen, method: str, path: str
) -> None:
    status, body = calling.call("Caller.ask", {"method": method, "path": path}).json()
    assert status == 403, body
    assert "API key" in body
