"""Rows of docs/reference/dependencies.md that are processes of the platform: each is really taken away, and
what the row says is looked at."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.harness import PlatformUnderTest, wait_for
from tests.e2e.test_faults_processes import without_supervisor

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.fixture(scope="module", name="lone")
def _lone(mortal_platform: PlatformUnderTest) -> Iterator[PlatformUnderTest]:
    """A platform that loses one process after the other."""
    mortal_platform.deploy("dependent.py")
    wait_for(
        lambda: mortal_platform.instances("dependent", "warm"), "the instance that is kept warm"
    )
    yield mortal_platform
    mortal_platform.cli("app", "delete", "dependent", "--yes")


def test_without_the_controller_calls_go_on_and_changes_wait(lone: PlatformUnderTest) -> None:
    with without_supervisor(lone):
        pid = lone.kill("controller")
        assert lone.result("dependent/warm", {"n": 1}) == 1
        submitted = lone.post("dependent/warm", {"n": 2}, verb="submit")
        deploy = httpx.post(
            f"{lone.url}/v1/apps/dependent/deploy",
            headers=lone.headers,
            json={"functions": [], "message": ""},
            timeout=30,
        )
        assert submitted.status_code == 202
        assert (deploy.status_code, deploy.headers["content-type"]) == (
            503,
            "application/problem+json",
        )
        assert int(deploy.headers["retry-after"]) >= 1
    lone.wait_restarted("controller", pid)
    wait_for(
        lambda: lone.usage("call = ?", submitted.json()["id"]),
        "the record of what was called meanwhile",
    )


def test_without_the_node_agent_warm_calls_go_on_and_a_cold_one_falls_back(
    lone: PlatformUnderTest,
) -> None:
    wait_for(lambda: not lone.instances("dependent", "cold"), "the function to be at zero")
    with without_supervisor(lone):
        pid = lone.kill("snapshotter")
        assert lone.result("dependent/warm", {"n": 1}) == 1
        headers = {**lone.headers, "pilotlight-timeout": "1"}
        answer = lone.post("dependent/cold", {"n": 1}, headers=headers)
        assert (answer.status_code, answer.json(), answer.headers["pilotlight-degraded"]) == (
            200,
            -1,
            "static",
        )
        assert lone.post("dependent/first", {"n": 1}, headers=headers).status_code in (503, 504)
    lone.wait_restarted("snapshotter", pid)
    assert lone.result("dependent/first", {"n": 7}) == 7


def test_without_the_weight_cache_what_needs_no_weights_starts(lone: PlatformUnderTest) -> None:
    wait_for(lambda: not lone.instances("dependent", "cold"), "the function to be at zero")
    with without_supervisor(lone):
        pid = lone.kill("weight_cache")
        assert lone.result("dependent/warm", {"n": 1}) == 1
        answer = lone.post("dependent/cold", {"n": 3})
        assert (answer.status_code, answer.json()) == (200, 3)
        assert "pilotlight-degraded" not in answer.headers
    lone.wait_restarted("weight_cache", pid)
